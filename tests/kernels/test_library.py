"""What the built library promises (docs/kernels.md), checked on the library of this checkout."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from elftools.elf.elffile import ELFFile

from vllm_series import cli_kernels, kernels
from vllm_series.errors import CheckFailed
from vllm_series.kernels import KernelBuild, inspect, toolchain
from vllm_series.kernels.inspect import check
from vllm_series.workspace import Workspace

LDD = shutil.which("ldd")
ROOT = Path(__file__).resolve().parents[2]


def test_it_is_built_by_the_fetched_nvcc(built: KernelBuild, ws: Workspace) -> None:
    made = built.provenance["nvcc"]
    assert made["source"] == "package index"
    pinned = {a.filename: a.sha256 for _, a in toolchain.load(ws).packages}
    assert {p["filename"]: p["sha256"] for p in made["packages"]} == pinned
    assert len(pinned) == 5
    assert re.search(r"\b\d+\.\d+\.\d+\b", built.provenance["host"]["c++"])
    for name, digest in built.provenance["sources"].items():
        assert kernels.build.__module__ and len(digest) == 64, name
    assert "overlay/csrc/dsa/topk_compare.cu" in built.provenance["sources"]
    text = json.dumps(built.provenance)
    assert str(ROOT) not in text and str(ws.cache) not in text


def test_exports_needs_and_code(built: KernelBuild) -> None:
    facts = inspect(built.library)
    check(facts)
    assert facts.architectures == ("sm_100a", "sm_90a")
    assert {"dsa_abi_version", "dsa_error_string", "dsa_topk_compare"} <= set(facts.exports)
    assert all(name.startswith("dsa_") for name in facts.exports)
    assert not [name for name in facts.needed if "cuda" in name or "stdc++" in name or "gcc" in name]
    assert tuple(int(n) for n in facts.glibc.split(".")) <= (2, 28)


def test_auditwheel_gives_it_the_tag_of_upstream_s_wheel(built: KernelBuild, tmp_path: Path) -> None:
    machine = built.provenance["machine"]
    wheel = tmp_path / f"probe-1-py3-none-linux_{machine}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(built.library, "probe/_dsa_C.so")
        archive.writestr("probe-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: probe\nVersion: 1\n")
        archive.writestr(
            "probe-1.dist-info/WHEEL",
            f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: py3-none-linux_{machine}\n",
        )
        names = [*archive.namelist(), "probe-1.dist-info/RECORD"]
        archive.writestr(names[-1], "".join(f"{name},,\n" for name in names))
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    tag = re.search(r'platform tag:\s+"manylinux_(\d+)_(\d+)_', said)
    assert tag, said
    assert (int(tag[1]), int(tag[2])) <= (2, 28), said


@pytest.mark.skipif(LDD is None, reason="no ldd on this machine")
def test_ldd_finds_everything(built: KernelBuild) -> None:
    said = subprocess.run([str(LDD), built.library], capture_output=True, text=True, check=True).stdout
    assert "not found" not in said
    assert "cuda" not in said


def test_it_loads_without_a_gpu_and_says_what_is_wrong(built: KernelBuild) -> None:
    code = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
lib.dsa_build_info.restype = lib.dsa_error_string.restype = ctypes.c_char_p
print(lib.dsa_abi_version(), lib.dsa_build_info().decode())
print(*(lib.dsa_error_string(code).decode() for code in (0, -1, -2, -99, 700, 100)), sep="|")
one = ctypes.c_void_p(1)
bad = [(0, -1, 8), (one, 1, 0), (one, 1, 2049), (None, 1, 8), (one, 1 << 31, 8)]
zero, i64 = ctypes.c_int64(0), ctypes.c_int64
print(*(lib.dsa_topk_compare(p, zero, p, zero, p, i64(r), k, p, None) for p, r, k in bad))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, built.library], capture_output=True, text=True, check=True
    )
    version, texts, codes = done.stdout.splitlines()
    header = (ROOT / "overlay/csrc/dsa/dsa.h").read_text()
    loader = (ROOT / "overlay/vllm/dsa/kernels.py").read_text()
    abi = re.search(r"#define DSA_ABI_VERSION (\d+)", header)
    mine = re.search(r"^ABI_VERSION = (\d+)", loader, re.M)
    assert abi and mine and abi[1] == mine[1]
    assert version == f"{abi[1]} abi={abi[1]};cuda=13.0;arch=sm_90a,sm_100a"
    assert texts.split("|")[:4] == [
        "ok",
        "invalid argument",
        "the library holds no code for this device",
        "unknown error code",
    ]
    assert "illegal memory access" in texts and "no CUDA-capable device" in texts
    assert codes.split() == ["-1"] * 5


def test_the_stand_ins_are_what_nvidia_s_runtime_needs(built: KernelBuild, ws: Workspace) -> None:
    """glibc-2.28.txt against the needs of the pinned libcudart.so.13, which was built on an old glibc."""
    runtime = next((ws.cache / "toolchain").glob("nvcc-*/nvidia/cu13/lib/libcudart.so.13"))
    with runtime.open("rb") as file:
        elf = ELFFile(file)
        names = {}
        for library, versions in elf.get_section_by_name(".gnu.version_r").iter_versions():
            names |= {version["vna_other"]: (library.name, version.name) for version in versions}
        index = elf.get_section_by_name(".gnu.version")
        symbols = elf.get_section_by_name(".dynsym")
        needs = {
            (*names[index.get_symbol(n)["ndx"]], symbol.name)
            for n, symbol in enumerate(symbols.iter_symbols())
            if symbol["st_shndx"] == "SHN_UNDEF" and index.get_symbol(n)["ndx"] in names
        }
    lines = (ROOT / "cmake/glibc-2.28.txt").read_text().splitlines()
    listed = {tuple(line.split()) for line in lines if not line.startswith("#")}
    if built.provenance["machine"] == "x86_64":
        assert listed - needs == {("libc.so.6", "GLIBC_2.4", "__stack_chk_fail")}
        assert needs <= listed
    assert len(needs) > 100


def test_check_names_every_broken_promise() -> None:
    facts = kernels.LibraryFacts(
        machine="x86_64",
        exports=("dsa_x", "cudaMalloc"),
        needed=("libc.so.6", "libcudart.so.13", "libstdc++.so.6"),
        runpath="/somewhere",
        versions=("libc.so.6:GLIBC_2.34", "libc.so.6:GLIBC_2.4", "libc.so.6:GLIBC_ABI_DT_RELR"),
        architectures=("sm_90",),
    )
    with pytest.raises(CheckFailed) as caught:
        check(facts)
    text = str(caught.value)
    for part in (
        "cudaMalloc",
        "dsa_abi_version",
        "libcudart.so.13, libstdc++",
        "GLIBC_2.34",
        "DT_RELR",
        "/somewhere",
        "sm_90,",
    ):
        assert part in text
    assert "GLIBC_2.4," not in text


def test_info_command(built: KernelBuild, ws: Workspace, tmp_path: Path) -> None:
    good = CliRunner().invoke(cli_kernels.group, ["info", str(built.library), "--json"])
    assert good.exit_code == 0, good.output
    assert json.loads(good.stdout)["sha256"] == built.sha256
    foreign = tmp_path / "libnot.so"
    foreign.write_bytes(b"not a library")
    assert isinstance(CliRunner().invoke(cli_kernels.group, ["info", str(foreign)]).exception, CheckFailed)
    libc = next(
        iter(sorted(Path("/lib").glob("*-linux-gnu/libc.so.6")) or sorted(Path("/lib64").glob("libc.so.6")))
    )
    assert isinstance(CliRunner().invoke(cli_kernels.group, ["info", str(libc)]).exception, CheckFailed)
