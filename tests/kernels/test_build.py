"""The build itself: reproducible, incremental, deaf to the user's variables, clear about mistakes."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from kernel_checkouts import Checkouts

from vllm_series import cli_kernels, kernels
from vllm_series.errors import CheckFailed
from vllm_series.kernels import KernelBuild, host, toolchain
from vllm_series.workspace import Workspace

pytestmark = pytest.mark.slow
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


@pytest.fixture(scope="module")
def clean(ws: Workspace, built: KernelBuild, tmp_path_factory: pytest.TempPathFactory) -> KernelBuild:
    """The small kernels and the noisy ones, built in one go in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        make = Checkouts(tmp_path_factory.mktemp("clean"), ws.cache / "toolchain", patch)
        return kernels.build(make("one", noisy=NOISY), jobs=2)


def test_another_folder_and_environment_give_the_same_bytes(
    clean: KernelBuild, checkouts: Checkouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ws = checkouts("a/longer place", noisy=NOISY)
    for name in ("CXXFLAGS", "CFLAGS", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CUDAFLAGS", "LDFLAGS"):
        monkeypatch.setenv(name, "-DWRONG -lwrong")
    monkeypatch.setenv("CPATH", str(ws.root))
    again = kernels.build(ws, jobs=1)
    assert not clean.reused and not again.reused
    assert "dsa_noisy" in again.provenance["library"]["exports"]
    assert again.sha256 == clean.sha256
    assert again.provenance == clean.provenance
    content = again.library.read_bytes()
    assert str(ws.root).encode() not in content and str(ws.cache).encode() not in content
    assert b"tmpxft" not in content


def test_a_killed_build_goes_on(clean: KernelBuild, checkouts: Checkouts) -> None:
    """Killed while CMake looks at the compilers, then while nvcc compiles; the third run ends the work."""
    ws = checkouts("killed", noisy=NOISY)
    code = f"""
from pathlib import Path
from vllm_series import kernels
from vllm_series.workspace import Workspace
kernels.build(Workspace(Path({str(ws.root)!r})), jobs=1)
"""
    for target in ("CMakeCache.txt", "csrc/CMakeFiles/_dsa_C.dir/*.o"):
        run = subprocess.Popen([sys.executable, "-c", code])
        end = time.monotonic() + 900
        while not list((ws.work / "kernels").glob(f"*/{target}")):
            assert run.poll() is None and time.monotonic() < end
            time.sleep(0.005)
        run.kill()
        run.wait()
        assert not list(ws.cache.glob("kernels/*/_dsa_C.so"))
    done = kernels.build(ws)
    assert not done.reused
    assert done.sha256 == clean.sha256


def test_whole_library_is_reproducible(built: KernelBuild, ws: Workspace) -> None:
    again = kernels.build(ws, force=True)
    assert not again.reused
    assert again.sha256 == built.sha256


def test_unchanged_inputs_take_the_cached_library(built: KernelBuild, ws: Workspace) -> None:
    written = built.library.stat().st_mtime_ns
    again = kernels.build(ws)
    assert again.reused
    assert again.library.stat().st_mtime_ns == written
    assert (again.library, again.sha256, again.provenance) == (built.library, built.sha256, built.provenance)


def test_edits_damage_and_mistakes(checkouts: Checkouts) -> None:
    ws = checkouts("edit")
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


def test_a_source_build_can_add_the_target(built: KernelBuild, checkouts: Checkouts, tmp_path: Path) -> None:
    """As upstream's own CMake project would: other architectures, no stand-ins, installed by component."""
    ws = checkouts("tree")
    project, out = tmp_path / "project", tmp_path / "installed"
    project.mkdir()
    (project / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\n"
        "set(CMAKE_CUDA_ARCHITECTURES 80)\n"
        "project(vllm_extensions LANGUAGES CXX CUDA)\n"
        f'add_subdirectory("{ws.root / CSRC}" csrc/dsa)\n'
    )
    tools = host.find()
    folder = project / "build"
    for command in (
        [tools.cmake, "-G", "Ninja", "-S", project, "-B", folder, "-DCMAKE_BUILD_TYPE=Release",
         f"-DCMAKE_MAKE_PROGRAM={tools.ninja}", f"-DCMAKE_CUDA_COMPILER={toolchain.pinned(ws).nvcc}",
         f"-DCMAKE_CUDA_HOST_COMPILER={tools.cxx}"],
        [tools.cmake, "--build", folder, "--target", "_dsa_C"],
        [tools.cmake, "--install", folder, "--component", "_dsa_C", "--prefix", out],
    ):  # fmt: skip
        done = subprocess.run(command, env=host.environment(tools.cxx), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    facts = kernels.inspect(out / "vllm" / "_dsa_C.so")
    assert facts.exports == kernels.inspect(kernels.build(ws).library).exports
    assert facts.architectures == ("sm_100a", "sm_90a")
    assert not [name for name in facts.needed if "cuda" in name or "stdc++" in name or "gcc" in name]
    handle = ctypes.CDLL(str(out / "vllm" / "_dsa_C.so"))
    assert handle.dsa_abi_version() == 1


def test_build_command(built: KernelBuild, ws: Workspace, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "_dsa_C.so"
    runner = CliRunner()
    done = runner.invoke(cli_kernels.group, ["build", "--json", "-o", str(out)], obj=ws.root)
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert (data["library"], data["sha256"], data["reused"]) == (str(out), built.sha256, True)
    assert out.read_bytes() == built.library.read_bytes()
