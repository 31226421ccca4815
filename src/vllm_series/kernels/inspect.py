"""Reads from a built library what it exports and needs and what GPU code it holds, without binutils."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from vllm_series.errors import CheckFailed

NEWEST_GLIBC = (2, 28)  # manylinux_2_28
ARCHITECTURES = ("sm_100a", "sm_90a")
_PREFIX = "dsa_"
_SYSTEM = re.compile(r"(libc|libm|libdl|libpthread|librt)\.so\.\d+|ld-linux-[a-z0-9-]+\.so\.\d+")
# ptxas leaves its command line in a note of each cubin; the ELF header tells sm_90 and sm_90a not apart.
_TARGET = re.compile(rb"-arch (sm_[0-9]+[af]?)\b")


@dataclass(frozen=True)
class LibraryFacts:
    """What the dynamic symbol table and the embedded GPU code of a library say."""

    machine: str  # "x86_64", "aarch64"
    exports: tuple[str, ...]
    needed: tuple[str, ...]  # sonames
    runpath: str
    versions: tuple[str, ...]  # symbol versions it needs, "libc.so.6:GLIBC_2.17"
    architectures: tuple[str, ...]  # "sm_90a"

    @property
    def glibc(self) -> str:
        """The newest glibc symbol version that is needed, for example ``2.17``."""
        numbers = [n for n in map(_glibc_number, self.versions) if n]
        return ".".join(map(str, max(numbers, default=(0,))))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "glibc": self.glibc}


def inspect(path: Path) -> LibraryFacts:
    """Read the facts of ``path``.

    Raises:
        CheckFailed: it is not a shared library.
    """
    try:
        with path.open("rb") as file:
            elf = ELFFile(file)
            dynamic, symbols = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
            if not isinstance(dynamic, DynamicSection) or not isinstance(symbols, SymbolTableSection):
                raise CheckFailed(f"{path} is not a shared library", fix="series kernels build")
            tags = list(dynamic.iter_tags())
            code = elf.get_section_by_name(".nv_fatbin")
            defined = [s.name for s in symbols.iter_symbols() if s["st_shndx"] != "SHN_UNDEF"]
            return LibraryFacts(
                machine=str(elf["e_machine"]).removeprefix("EM_").lower(),
                exports=tuple(sorted(filter(None, defined))),
                needed=tuple(sorted(getattr(t, "needed", "") for t in tags if t.entry.d_tag == "DT_NEEDED")),
                runpath=":".join(
                    getattr(t, "runpath", "") or getattr(t, "rpath", "")
                    for t in tags
                    if t.entry.d_tag in {"DT_RUNPATH", "DT_RPATH"}
                ),
                versions=tuple(sorted(_versions(elf))),
                architectures=tuple(
                    sorted({m.decode() for m in _TARGET.findall(code.data())} if code else ())
                ),
            )
    except (ELFError, OSError) as err:
        raise CheckFailed(f"{path} cannot be read as a library: {err}", fix="series kernels build") from err


def check(facts: LibraryFacts) -> None:
    """Check the promises of docs/kernels.md.

    Raises:
        CheckFailed: names every promise that does not hold.
    """
    wrong = []
    foreign = [name for name in facts.exports if not name.startswith(_PREFIX)]
    if foreign:
        wrong.append(f"exports other names than {_PREFIX}*: {', '.join(foreign[:5])}")
    if "dsa_abi_version" not in facts.exports:
        wrong.append("lacks dsa_abi_version")
    unknown = [name for name in facts.needed if not _SYSTEM.fullmatch(name)]
    if unknown:
        wrong.append(f"needs libraries beyond glibc: {', '.join(unknown)}")
    newer = [v for v in facts.versions if (_glibc_number(v) or (999,)) > NEWEST_GLIBC]
    if newer:
        wrong.append(f"needs symbol versions that glibc 2.28 lacks: {', '.join(newer[:5])}")
    if facts.runpath:
        wrong.append(f"has a run path: {facts.runpath}")
    if facts.architectures != ARCHITECTURES:
        have = ", ".join(facts.architectures) or "no GPU"
        wrong.append(f"holds code for {have}, expected {', '.join(ARCHITECTURES)}")
    if wrong:
        text = "\n  ".join(["the kernel library is not what docs/kernels.md promises:", *wrong])
        raise CheckFailed(text, fix="build it with: series kernels build")


def _versions(elf: ELFFile) -> Iterator[str]:
    section = elf.get_section_by_name(".gnu.version_r")
    if not isinstance(section, GNUVerNeedSection):
        return
    for library, names in section.iter_versions():
        for name in names:
            yield f"{library.name}:{name.name}"


def _glibc_number(version: str) -> tuple[int, ...] | None:
    found = re.search(r":GLIBC_(\d+(?:\.\d+)*)$", version)
    return tuple(int(n) for n in found[1].split(".")) if found else None
