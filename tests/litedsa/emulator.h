// Runs the kernels of litedsa on the CPU: each CUDA thread is a fiber, and the few instructions that they use are written out here after
// the PTX manual. It checks index arithmetic, swizzles, fragments, barrier phases and tails, and it finds deadlocks. It does not check
// races between proxies, nor whether the manual was understood: a card does.
//
// Two modes. Eager: asynchronous copies and wgmma happen where they are issued. Lazy: where the thread waits for them, so that a missing
// wait, or memory that is given back too early, changes the result. Fibers run in a random order. Shared memory starts as NaN.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define DSA_SHARED static
#define DSA_GRID_CONSTANT
#define DSA_SM90A 1
#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())

struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct int4 {
  int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
using std::max;
using std::min;

namespace emulator {

constexpr int kSharedBytes = 232448;  // what a CTA can have on Hopper

struct Index {
  unsigned x;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  const char* waiting = "";
  // Groups; the last one is open. Copies whose end a barrier is told of are in `detached`: they happen at any later time.
  std::vector<std::vector<std::function<void()>>> copies, detached, products;
};

struct Warp {
  int arrived = 0;
  unsigned generation = 0;
  uint64_t values[2][32];
};

struct NamedBarrier {
  int arrived = 0;
  unsigned generation = 0;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  NamedBarrier named[16];
  ucontext_t scheduler;
  int current = 0;
  unsigned block = 0;
  int64_t progress = 0;
  int synced = 0;
  unsigned sync_generation = 0;
  bool lazy = false;
  std::mt19937 random;
  std::function<void()> body;
};

inline Machine& machine() {
  static Machine m;
  return m;
}

inline uint8_t* shared() {
  alignas(1024) static uint8_t bytes[kSharedBytes];
  return bytes;
}

[[noreturn]] inline void fail(const char* what) {
  std::printf("emulator: %s (thread %d)\n", what, machine().current);
  std::exit(1);
}

inline Index thread_index() { return {static_cast<unsigned>(machine().current)}; }
inline Index block_index() { return {machine().block}; }
inline Fiber& self() { return machine().fibers[machine().current]; }

inline void yield(const char* why) {
  self().waiting = why;
  swapcontext(&self().context, &machine().scheduler);
}

inline void enter() {
  machine().body();
  Fiber& f = self();
  if (!f.copies.empty() || !f.detached.empty() || !f.products.empty()) fail("a thread ended without waiting for its copies or products");
  f.done = true;
  ++machine().progress;
  swapcontext(&f.context, &machine().scheduler);
}

// The oldest detached copies of a thread happen.
inline void detach(Fiber& f) {
  for (auto& work : f.detached.front()) work();
  f.detached.erase(f.detached.begin());
  ++machine().progress;
}

// Runs one CTA.
inline void run(unsigned block, int threads, bool lazy, unsigned seed, std::function<void()> body) {
  Machine& m = machine();
  m.fibers.clear();
  m.fibers.resize(threads);
  m.warps.assign(threads / 32, Warp());
  m.block = block;
  m.lazy = lazy;
  m.synced = 0;
  for (NamedBarrier& b : m.named) b = NamedBarrier();
  m.random.seed(seed);
  m.body = std::move(body);
  std::memset(shared(), 0xff, kSharedBytes);  // NaN as bf16 and as float
  constexpr int kStack = 64 * 1024;
  for (Fiber& f : m.fibers) {
    f.stack.reset(new char[kStack]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  std::vector<int> order(threads);
  for (int i = 0; i < threads; ++i) order[i] = i;
  bool hurry = false;
  for (;;) {
    std::shuffle(order.begin(), order.end(), m.random);
    const int64_t before = m.progress;
    bool alive = false;
    for (int i : order) {
      if (m.fibers[i].done) continue;
      alive = true;
      m.current = i;
      if (!m.fibers[i].detached.empty() && (hurry || m.random() % 4 == 0)) detach(m.fibers[i]);
      swapcontext(&m.scheduler, &m.fibers[i].context);
    }
    if (!alive) return;
    if (m.progress == before && !hurry) {
      hurry = true;
      continue;
    }
    hurry = false;
    if (m.progress == before) {
      for (int i = 0; i < threads; i += 32)
        std::printf("  thread %d: %s\n", i, m.fibers[i].done ? "ended" : m.fibers[i].waiting);
      fail("deadlock");
    }
  }
}

// Asynchronous work of a thread in groups: the last group takes what comes until it is committed.
using Groups = std::vector<std::vector<std::function<void()>>>;
inline void add(Groups& groups, std::function<void()> work) {
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back(std::move(work));
}
inline void commit(Groups& groups) {
  if (!groups.empty()) groups.emplace_back();
}
// Does all but the last `pending` committed groups; with 0, everything.
inline void finish(Groups& groups, int pending) {
  while (static_cast<int>(groups.size()) > (pending ? pending + 1 : 0)) {
    for (auto& work : groups.front()) work();
    groups.erase(groups.begin());
  }
}

// All lanes of the warp give a value and get all values.
inline const uint64_t* exchange(uint64_t value, const char* why) {
  Machine& m = machine();
  Warp& w = m.warps[m.current / 32];
  const unsigned generation = w.generation;
  w.values[generation % 2][m.current % 32] = value;
  ++m.progress;
  if (++w.arrived == 32) {
    w.arrived = 0;
    ++w.generation;
  } else {
    while (w.generation == generation) yield(why);
  }
  return w.values[generation % 2];
}

// The address that the 128-byte swizzle makes of one without it.
inline int swizzled(int address) { return address ^ ((address >> 7 & 7) << 4); }

inline float bf16_at(int address) {
  if (address < 0 || address + 2 > kSharedBytes) fail("a matrix operand lies outside of shared memory");
  uint32_t bits = 0;
  std::memcpy(reinterpret_cast<char*>(&bits) + 2, shared() + address, 2);
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

struct Operand {
  int start, leading, stride;
  explicit Operand(uint64_t d)
      : start(static_cast<int>(d & 0x3fff) << 4), leading(static_cast<int>(d >> 16 & 0x3fff) << 4),
        stride(static_cast<int>(d >> 32 & 0x3fff) << 4) {
    if (d >> 62 != 1) fail("not the 128-byte swizzle");
    if (d >> 46 & 0xffff) fail("base offset or reserved bits are set");
  }
  // Element k of row (or column) i.
  float k_major(int i, int k) const { return bf16_at(swizzled(start + i / 8 * stride + i % 8 * 128 + k * 2)); }
  float mn_major(int i, int k) const {
    return bf16_at(swizzled(start + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2));
  }
};

// This thread's share of d[64 x columns] (+)= a[64 x 16] * b[16 x columns]; rows: a's 16 elements of the thread's two rows.
inline void multiply(float* d, const float (&rows)[2][16], uint64_t b_desc, int columns, bool b_mn, bool accumulate) {
  const Operand b(b_desc);
  const int thread = machine().current % 128;
  for (int j = 0; j < columns / 8; ++j)
    for (int c = 0; c < 2; ++c) {
      const int column = 8 * j + thread % 4 * 2 + c;
      float values[16];
      for (int k = 0; k < 16; ++k) values[k] = b_mn ? b.mn_major(column, k) : b.k_major(column, k);
      for (int r = 0; r < 2; ++r) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += rows[r][k] * values[k];
        float& out = d[4 * j + 2 * r + c];
        out = accumulate ? out + sum : sum;
      }
    }
}

inline void multiply(float* d, uint64_t a_desc, uint64_t b_desc, int columns, bool b_mn, bool accumulate) {
  const Operand a(a_desc);
  const int thread = machine().current % 128, row = thread / 32 * 16 + thread % 32 / 4;
  float rows[2][16];
  for (int r = 0; r < 2; ++r)
    for (int k = 0; k < 16; ++k) rows[r][k] = a.k_major(row + 8 * r, k);
  multiply(d, rows, b_desc, columns, b_mn, accumulate);
}

struct Barrier {
  uint16_t pending, expected;
  uint32_t phase;
};

}  // namespace emulator

inline uint8_t* emulated_shared() { return emulator::shared(); }

template <typename T>
T __ldg(const T* p) {
  return *p;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) << (by % 32) >> 32);
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __uint_as_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t atomicOr(uint32_t* p, uint32_t v) {
  const uint32_t old = *p;
  *p |= v;
  return old;
}
inline void __syncthreads() {
  emulator::Machine& m = emulator::machine();
  const unsigned generation = m.sync_generation;
  ++m.progress;
  if (++m.synced == static_cast<int>(m.fibers.size())) {
    m.synced = 0;
    ++m.sync_generation;
  } else {
    while (m.sync_generation == generation) emulator::yield("__syncthreads");
  }
}
// True in all threads if `v` holds in one.
inline int __syncthreads_or(int v) {
  static unsigned any[2];
  const unsigned generation = emulator::machine().sync_generation;
  if (v) any[generation % 2] = generation + 1;
  __syncthreads();
  return any[generation % 2] == generation + 1;
}
inline void __syncwarp() { emulator::exchange(0, "__syncwarp"); }
template <typename T>
T emulated_shuffle(T value, int source) {
  static_assert(sizeof(T) == 4, "");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, 4);
  const uint64_t got = emulator::exchange(bits, "shuffle")[source];
  T result;
  std::memcpy(&result, &got, 4);
  return result;
}
template <typename T>
T __shfl_sync(unsigned, T v, int source) {
  return emulated_shuffle(v, source % 32);
}
template <typename T>
T __shfl_xor_sync(unsigned, T v, int mask) {
  return emulated_shuffle(v, (emulator::machine().current % 32) ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T v, int delta) {
  const int lane = emulator::machine().current % 32;
  return emulated_shuffle(v, lane < delta ? lane : lane - delta);
}
inline unsigned __ballot_sync(unsigned, bool v) {
  const uint64_t* all = emulator::exchange(v, "vote");
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i] != 0) << i;
  return bits;
}
inline int __reduce_add_sync(unsigned, int v) {
  const uint64_t* all = emulator::exchange(static_cast<uint32_t>(v), "reduction");
  uint32_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<uint32_t>(all[i]);
  return static_cast<int>(sum);
}
inline int __all_sync(unsigned, bool v) {
  const uint64_t* all = emulator::exchange(v, "vote");
  return std::all_of(all, all + 32, [](uint64_t x) { return x != 0; });
}

namespace dsa {
namespace ptx {

inline uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - emulator::shared());
}
inline emulator::Barrier& barrier(uint64_t* bar) {
  emulator::Barrier& b = *reinterpret_cast<emulator::Barrier*>(bar);
  if (b.expected == 0 || b.expected > 1024) emulator::fail("a barrier was not initialised");
  return b;
}
inline void barrier_init(uint64_t* bar, uint32_t arrivals) {
  *reinterpret_cast<emulator::Barrier*>(bar) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint64_t* bar) {
  emulator::Barrier& b = barrier(bar);
  ++emulator::machine().progress;
  if (--b.pending == 0) {
    b.pending = b.expected;
    ++b.phase;
  }
}
// True once the phase of that parity has completed; a new barrier counts as having completed parity 1.
inline void barrier_wait(uint64_t* bar, uint32_t parity) {
  while ((barrier(bar).phase & 1) == parity) emulator::yield("mbarrier");
}
inline void named_arrive(int id, int threads) {
  emulator::NamedBarrier& b = emulator::machine().named[id];
  ++emulator::machine().progress;
  if (++b.arrived == threads) {
    b.arrived = 0;
    ++b.generation;
  }
}
inline void named_sync(int id, int threads) {
  emulator::NamedBarrier& b = emulator::machine().named[id];
  const unsigned generation = b.generation;
  named_arrive(id, threads);
  while (b.generation == generation) emulator::yield("named barrier");
}
inline void fence_async_proxy() {}
inline uint32_t opaque(uint32_t x) { return x; }

inline void copy_async_16(void* target, const void* source, int bytes) {
  const auto copy = [=] {
    if (bytes) std::memcpy(target, source, 16);
    else std::memset(target, 0, 16);
  };
  if (emulator::machine().lazy) emulator::add(emulator::self().copies, copy);
  else copy();
}
inline void copy_async_wait() {
  emulator::Fiber& f = emulator::self();
  while (!f.detached.empty()) emulator::detach(f);
  emulator::finish(f.copies, 0);
}
inline void copy_async_arrive(uint64_t* bar) {
  emulator::Fiber& f = emulator::self();
  if (!emulator::machine().lazy) return barrier_arrive(bar);
  emulator::add(f.copies, [=] { barrier_arrive(bar); });
  f.detached.push_back(std::move(f.copies.back()));
  f.copies.clear();
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline uint32_t round_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if (std::isnan(f)) return 0x7fff;
  return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) { return round_bf16(high) << 16 | round_bf16(low); }
inline float e4m3(uint32_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float sign = byte & 0x80 ? -1.0f : 1.0f;
  if (exponent == 15 && mantissa == 7) return NAN;
  return sign * (exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9));
}
inline void unpack_e4m3(uint32_t packed, float (&f)[4]) {
  for (int i = 0; i < 4; ++i) f[i] = e4m3(packed >> (8 * i) & 0xff);
}
template <int>
void registers_decrease() {}
template <int>
void registers_increase() {}

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit(emulator::self().products); }
template <int kPending, int N>
void wgmma_wait(float (&)[N]) {
  emulator::finish(emulator::self().products, kPending);
}
inline void issue(std::function<void()> product) {
  if (emulator::machine().lazy) emulator::add(emulator::self().products, std::move(product));
  else product();
}
inline void wgmma_m64n64k16_bf16(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  float* out = d;
  issue([=] { emulator::multiply(out, a, b, 64, false, accumulate != 0); });
}
inline void wgmma_m64n256k16_bf16_mn(float (&d)[128], uint64_t a, uint64_t b) {
  float* out = d;
  issue([=] { emulator::multiply(out, a, b, 256, true, true); });
}
// a: the thread's own elements of two rows; those of the other columns are with the other three lanes of its quad.
inline void wgmma_m64n256k16_bf16_mn(float (&d)[128], const uint32_t* a, uint64_t b) {
  float* out = d;
  float rows[2][16];
  for (int i = 0; i < 4; ++i) {
    const uint64_t* lanes = emulator::exchange(a[i], "wgmma");
    for (int quad = 0; quad < 4; ++quad) {
      const uint32_t bits = static_cast<uint32_t>(lanes[emulator::machine().current % 32 / 4 * 4 + quad]);
      for (int c = 0; c < 2; ++c) rows[i % 2][i / 2 * 8 + quad * 2 + c] = __uint_as_float((bits >> (16 * c)) << 16);
    }
  }
  struct Rows {
    float values[2][16];
  } held;
  std::memcpy(held.values, rows, sizeof(rows));
  issue([=] { emulator::multiply(out, held.values, b, 256, true, true); });
}

}  // namespace ptx
}  // namespace dsa
