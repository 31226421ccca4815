// The part of elfutils' libdwfl that DeepJIT names, for machines without its header. DeepJIT opens the library at
// run time and goes without where it is missing.
#pragma once

#include <elf.h>
#include <stdint.h>
#include <sys/types.h>

typedef uint64_t Dwarf_Addr;
typedef Elf64_Addr GElf_Addr;
typedef Elf64_Word GElf_Word;
typedef struct Elf Elf;
typedef struct Dwfl Dwfl;
typedef struct Dwfl_Line Dwfl_Line;
typedef struct Dwfl_Module Dwfl_Module;

typedef struct {
    int (*find_elf)(Dwfl_Module*, void**, const char*, Dwarf_Addr, char**, Elf**);
    int (*find_debuginfo)(Dwfl_Module*, void**, const char*, Dwarf_Addr, const char*, const char*, GElf_Word, char**);
    int (*section_address)(Dwfl_Module*, void**, const char*, Dwarf_Addr, const char*, GElf_Word, const void*,
                           Dwarf_Addr*);
    char** debuginfo_path;
} Dwfl_Callbacks;

extern "C" {
Dwfl* dwfl_begin(const Dwfl_Callbacks*);
int dwfl_linux_proc_report(Dwfl*, pid_t);
int dwfl_linux_proc_find_elf(Dwfl_Module*, void**, const char*, Dwarf_Addr, char**, Elf**);
int dwfl_report_end(Dwfl*, int (*)(Dwfl_Module*, void*, const char*, Dwarf_Addr, void*), void*);
Dwfl_Module* dwfl_addrmodule(Dwfl*, Dwarf_Addr);
const char* dwfl_module_addrname(Dwfl_Module*, GElf_Addr);
Dwfl_Line* dwfl_module_getsrc(Dwfl_Module*, Dwarf_Addr);
const char* dwfl_lineinfo(Dwfl_Line*, Dwarf_Addr*, int*, int*, Dwarf_Addr*, Dwarf_Addr*);
}
