/* Preloaded into the tool and the git that it runs: counts what makes, renames, links or removes a name in the
 * file system, over all processes of a run, and kills the whole process group right before number KILL_AT.
 * KILL_COUNT is a file of four bytes that holds the count; what was about to happen is appended to KILL_LOG, with
 * KILL_AT=0 all of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static unsigned *count, at;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("KILL_COUNT"), *number = getenv("KILL_AT");
    int fd = file ? REAL(open)(file, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *place = mmap(NULL, sizeof(unsigned), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (place == MAP_FAILED) return;
    at = number ? (unsigned)strtoul(number, NULL, 10) : 0;
    count = place;
}

static void step(const char *what, const char *path) {
    if (!count || !path || (!strncmp(path, "/dev/", 5) && strncmp(path, "/dev/shm/", 9))) return;
    int saved = errno;
    unsigned number = __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
    const char *log = getenv("KILL_LOG");
    if (log && (at == 0 || number == at)) {
        int fd = REAL(open)(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (fd >= 0) dprintf(fd, "%u %s %s\n", number, what, path);
        if (fd >= 0) close(fd);
    }
    errno = saved;
    if (number != at) return;
    kill(0, SIGKILL);
    pause();
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & O_CREAT) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        MODE(flags) \
        if (flags & (O_CREAT | O_TRUNC)) step("open", path); \
        return REAL(name)(path, flags, mode); }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int dir, const char *path, int flags, ...) { \
        MODE(flags) \
        if (flags & (O_CREAT | O_TRUNC)) step("open", path); \
        return REAL(name)(dir, path, flags, mode); }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
    FILE *name(const char *path, const char *how) { \
        if (*how != 'r') step("fopen", path); \
        return REAL(name)(path, how); }
FOPEN(fopen)
FOPEN(fopen64)

#define WRAP(name, path, params, args) int name params { step(#name, path); return REAL(name) args; }
WRAP(mkdir, p, (const char *p, mode_t m), (p, m))
WRAP(mkdirat, p, (int d, const char *p, mode_t m), (d, p, m))
WRAP(rmdir, p, (const char *p), (p))
WRAP(unlink, p, (const char *p), (p))
WRAP(unlinkat, p, (int d, const char *p, int f), (d, p, f))
WRAP(rename, b, (const char *a, const char *b), (a, b))
WRAP(renameat, b, (int d, const char *a, int e, const char *b), (d, a, e, b))
WRAP(link, b, (const char *a, const char *b), (a, b))
WRAP(linkat, b, (int d, const char *a, int e, const char *b, int f), (d, a, e, b, f))
WRAP(symlink, b, (const char *a, const char *b), (a, b))
WRAP(symlinkat, b, (const char *a, int d, const char *b), (a, d, b))
