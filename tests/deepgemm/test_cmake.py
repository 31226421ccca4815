"""vLLM's deepgemm.cmake, as the patches leave it, configured by cmake: patched once, accepted, refused."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import minimal_tree
import pytest

from vllm_series import importer, pins, stack
from vllm_series.deepgemm import bundle, patchfile
from vllm_series.deepgemm.patchfile import State
from vllm_series.fetch import fetch
from vllm_series.workspace import Workspace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WS = Workspace(ROOT)
#: What vLLM's CMakeLists.txt has set when it includes the file; cmake/utils.cmake is upstream's.
PROJECT = """
cmake_minimum_required(VERSION 3.26)
project(vllm_deepgemm_configure LANGUAGES NONE)
set(CMAKE_CUDA_COMPILER_VERSION 13.0)
if(NOT DEFINED CUDA_ARCHS)
  set(CUDA_ARCHS "9.0a;10.0a")
endif()
set(Python_EXECUTABLE "${PYTHON}")
include(cmake/utils.cmake)
include(cmake/external_projects/deepgemm.cmake)
"""


@functools.cache
def files_of(line: str) -> dict[str, bytes]:
    """What the configuration of DeepGEMM reads of a line's patched tree."""
    git, head = importer.odb(WS), stack.current(WS, pins.load_pin(WS, line)).head
    wanted = ("cmake/utils.cmake", "cmake/external_projects/deepgemm.cmake", "tools/build_deepgemm_C.py")
    copies = [f"{patchfile.OVERLAY}/{name}" for name in ("patch_deepgemm.cmake", f"{line}.patch")]
    return {name: git.raw("show", f"{head}:{name}") for name in (*wanted, *copies)}


class Tree:
    """The part of a line's patched tree that the configuration of DeepGEMM reads."""

    def __init__(self, line: str, folder: Path) -> None:
        self.patch = patchfile.patch_of(WS, pins.load_pin(WS, line))
        self.folder, self.build = folder, folder / "build"
        for name, data in files_of(line).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        (folder / "CMakeLists.txt").write_text(PROJECT)

    def configure(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        ours = ("DEEPGEMM_SRC_DIR", "VLLM_DSA", "VLLM_DSA_DEEPGEMM")
        env = {name: value for name, value in os.environ.items() if name not in ours} | environment
        argv = [
            "cmake",
            "-S",
            str(self.folder),
            "-B",
            str(self.build),
            f"-DPYTHON={sys.executable}",
            *options,
        ]
        return subprocess.run(argv, capture_output=True, text=True, check=False, env=env)


@pytest.fixture(scope="module", params=["0.33.0", "0.28.0"])
def line(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tree(line: str, tmp_path: Path) -> Tree:
    return Tree(line, tmp_path / "vllm")


def test_a_fetched_source_is_patched_once(tree: Tree) -> None:
    # upstream's own branch for a source that an earlier configure fetched
    fetched = minimal_tree.write(tree.patch, tree.build / "_deps" / "deepgemm-src", whole=True)
    first = tree.configure()
    assert first.returncode == 0, first.stderr
    assert "DeepGEMM: applied the patch of line" in first.stdout
    assert tree.patch.state(fetched) is State.PATCHED
    before = minimal_tree.digest(fetched)
    second = tree.configure()
    assert second.returncode == 0 and "has the patch of line" in second.stdout
    assert minimal_tree.digest(fetched) == before


def test_a_fetched_source_of_another_commit_stops_the_build(tree: Tree) -> None:
    fetched = minimal_tree.write(tree.patch, tree.build / "_deps" / "deepgemm-src", whole=True)
    header = fetched / "csrc/apis/attention.hpp"
    header.write_text(header.read_text().replace('#include "layout.hpp"', '#include "layouts.hpp"'))
    before = minimal_tree.digest(fetched)
    done = tree.configure()
    said = " ".join(done.stderr.split())
    assert done.returncode != 0 and "does not apply to" in said
    assert "Applies-To:" in said and "-DVLLM_DSA_DEEPGEMM=OFF" in said
    assert minimal_tree.digest(fetched) == before


def test_a_source_of_the_user_is_refused_until_it_has_the_patch(tree: Tree, tmp_path: Path) -> None:
    mine = minimal_tree.write(tree.patch, tmp_path / "mine", whole=True)
    before = minimal_tree.digest(mine)
    refused = tree.configure(DEEPGEMM_SRC_DIR=str(mine))
    said = " ".join(refused.stderr.split())
    patch = tree.folder / patchfile.OVERLAY / tree.patch.file.name
    assert refused.returncode != 0 and "lacks the patch" in said
    assert f"fix: git -C {mine} apply {patch}" in said
    assert minimal_tree.digest(mine) == before, "never changed"
    subprocess.run(["git", "-C", mine, "apply", patch], check=True)
    accepted = tree.configure(DEEPGEMM_SRC_DIR=str(mine))
    assert accepted.returncode == 0 and "has the patch of line" in accepted.stdout, accepted.stderr


@pytest.mark.parametrize("switch", ["VLLM_DSA_DEEPGEMM=OFF", "VLLM_DSA=0"])
def test_without_the_patch_on_request(tree: Tree, tmp_path: Path, switch: str) -> None:
    mine = minimal_tree.write(tree.patch, tmp_path / "mine", whole=True)
    before = minimal_tree.digest(mine)
    for options, environment in (([], dict([switch.split("=")])), ([f"-D{switch}"], {})):
        done = tree.configure(f"-DDEEPGEMM_SRC_DIR={mine}", *options, **environment)
        assert done.returncode == 0 and f"left as it is ({switch})" in done.stdout, done.stderr
    assert minimal_tree.digest(mine) == before


def test_a_build_for_other_cards_takes_any_source(tree: Tree, tmp_path: Path) -> None:
    mine = minimal_tree.write(tree.patch, tmp_path / "mine", whole=True)
    before = minimal_tree.digest(mine)
    done = tree.configure(f"-DDEEPGEMM_SRC_DIR={mine}", "-DCUDA_ARCHS=8.0;10.0a+PTX")
    assert done.returncode == 0 and "only compute capability 9.0 uses the patch" in done.stdout, done.stderr
    assert minimal_tree.digest(mine) == before
    refused = tree.configure(f"-DDEEPGEMM_SRC_DIR={mine}", "-DCUDA_ARCHS=8.0;9.0+PTX")
    assert refused.returncode != 0 and "lacks the patch" in " ".join(refused.stderr.split())


def test_without_git_the_message_says_how_to_build_without_the_patch(tree: Tree) -> None:
    fetched = minimal_tree.write(tree.patch, tree.build / "_deps" / "deepgemm-src", whole=True)
    before = minimal_tree.digest(fetched)
    places = ("CMAKE_SYSTEM_PATH", "SYSTEM_ENVIRONMENT_PATH", "CMAKE_ENVIRONMENT_PATH")
    done = tree.configure(
        f"-DCMAKE_MAKE_PROGRAM={shutil.which('make') or sys.executable}",
        *(f"-DCMAKE_FIND_USE_{place}=OFF" for place in places),
    )
    said = " ".join(done.stderr.split())
    assert done.returncode != 0 and "git, which checks and applies the patch" in said
    assert "-DVLLM_DSA_GIT=" in said and "cmake -DVLLM_DSA_DEEPGEMM=OFF" in said
    assert minimal_tree.digest(fetched) == before


def test_the_shim_of_the_official_wheel_takes_the_patch(tmp_path: Path) -> None:
    """``_C.py`` of the pinned commit, which upstream's wheel has as it is, in place of the minimal tree's."""
    pin = pins.load_pin(WS, "0.33.0")
    one = patchfile.patch_of(WS, pin)
    tree = minimal_tree.write(one, tmp_path / "src")
    with zipfile.ZipFile(fetch(WS, pin.wheels["x86_64"])) as wheel:
        shim = wheel.read(f"{bundle.PACKAGE}_C.py")
    (tree / "deep_gemm/_C.py").write_bytes(shim)
    assert one.apply(tree)
    added = (tree / "deep_gemm/_C.py").read_text()
    assert "_torch_ops.fp8_fp4_mqa_logits_out(" in added
    compile(added, "_C.py", "exec")
    assert (
        added.replace(
            added[
                added.index("if hasattr(_torch_ops, 'fp8_fp4_mqa_logits_out')") : added.index(
                    "def get_mqa_logits_metadata("
                )
            ],
            "",
            1,
        )
        == shim.decode()
    )
