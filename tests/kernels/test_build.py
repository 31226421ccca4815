"""The build itself: reproducible, incremental, deaf to the user's variables, clear about mistakes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from vllm_series import cli_kernels, kernels
from vllm_series.errors import CheckFailed
from vllm_series.kernels import KernelBuild
from vllm_series.workspace import Workspace

pytestmark = pytest.mark.slow
Checkouts = Callable[[str], Workspace]
CSRC = Path("overlay/csrc/dsa")

#: Everything that is known to bring paths or random names into nvcc's output.
NOISY = """
#include <cstdio>
#include "common.cuh"
namespace { __device__ int counter; __global__ void hidden(int* p) { *p = atomicAdd(&counter, 1); } }
static __global__ void internal(int* p) { printf("%s %d", __FILE__, __LINE__); *p = 1; }
template <int N> static __global__ void instance(int* p) { *p = N; }
DSA_EXPORT int dsa_noisy(int* p) {
  hidden<<<1, 1>>>(p);
  internal<<<1, 1>>>(p);
  instance<3><<<1, 1>>>(p);
  return dsa::launch_status();
}
"""


def test_two_folders_give_the_same_bytes(small_checkout: Checkouts, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = small_checkout("one"), small_checkout("a/longer place")
    for ws in (one, two):
        (ws.root / CSRC / "noisy.cu").write_text(NOISY)
    first = kernels.build(one, force=True, jobs=2)
    bytes_of_first = first.library.read_bytes()
    for name in ("CXXFLAGS", "CFLAGS", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CUDAFLAGS", "LDFLAGS"):
        monkeypatch.setenv(name, "-DWRONG -lwrong")
    monkeypatch.setenv("CPATH", str(two.root))
    second = kernels.build(two, force=True, jobs=1)
    assert not first.reused and not second.reused
    assert "dsa_noisy" in first.provenance["library"]["exports"]
    assert second.sha256 == first.sha256
    assert second.provenance == first.provenance
    for place in (one.root, two.root, one.cache):
        assert str(place).encode() not in bytes_of_first
    assert b"tmpxft" not in bytes_of_first


def test_whole_library_is_reproducible(built: KernelBuild, ws: Workspace) -> None:
    again = kernels.build(ws, force=True)
    assert not again.reused
    assert again.sha256 == built.sha256


def test_unchanged_inputs_take_the_cached_library(built: KernelBuild, ws: Workspace) -> None:
    start = time.monotonic()
    again = kernels.build(ws)
    assert time.monotonic() - start < 5
    assert again.reused
    assert (again.library, again.sha256, again.provenance) == (built.library, built.sha256, built.provenance)


def test_edits_damage_and_mistakes(small_checkout: Checkouts) -> None:
    ws = small_checkout("edit")
    source = ws.root / CSRC / "abi.cu"
    text = source.read_text()
    first = kernels.build(ws)

    # An edit gives another library, and only the edited file is compiled.
    source.write_text(text.replace('return "ok";', 'return "fine";'))
    second = kernels.build(ws)
    assert second.sha256 != first.sha256 and b"fine" in second.library.read_bytes()
    log = next((ws.work / "kernels").glob("*/log.txt")).read_text()
    assert "abi.cu.o" in log and "topk_compare.cu.o" not in log

    # A damaged cache is noticed.
    second.library.write_bytes(second.library.read_bytes()[:-7])
    third = kernels.build(ws)
    assert third.sha256 == second.sha256 and not third.reused

    # A mistake: the compiler's own words, nothing lost, and the next run works.
    source.write_text(text + "\nint broken() { return nothing; }\n")
    with pytest.raises(CheckFailed, match=r"abi\.cu\(\d+\): error: identifier .nothing"):
        kernels.build(ws)
    source.write_text(text)
    assert kernels.build(ws).sha256 == first.sha256

    # A function of glibc 2.36 fails the link, by name.
    late = 'extern "C" int pidfd_open(int, unsigned);\nDSA_EXPORT int dsa_late() { return pidfd_open(1, 0); }'
    source.write_text(f"{text}\n{late}\n")
    with pytest.raises(CheckFailed, match="undefined reference to `pidfd_open'"):
        kernels.build(ws)

    # A warning is an error: nothing may hide in a long log.
    source.write_text(text + "\nDSA_EXPORT int dsa_warn(int n) { int unused = 1; return n; }\n")
    with pytest.raises(CheckFailed, match="never referenced"):
        kernels.build(ws)

    # An export outside of our name space breaks a promise.
    source.write_text(text + "\nDSA_EXPORT int other_name() { return 1; }\n")
    with pytest.raises(CheckFailed, match="other_name"):
        kernels.build(ws)


def test_build_command(built: KernelBuild, ws: Workspace, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "_dsa_C.so"
    runner = CliRunner()
    done = runner.invoke(cli_kernels.group, ["build", "--json", "-o", str(out)], obj=ws.root)
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert (data["library"], data["sha256"], data["reused"]) == (str(out), built.sha256, True)
    assert out.read_bytes() == built.library.read_bytes()
