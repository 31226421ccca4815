"""vLLM's deepgemm.cmake, as the patches leave it, configured by cmake: patched once, accepted, refused."""

from __future__ import annotations

import os
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
set(CUDA_ARCHS "9.0a;10.0a")
set(Python_EXECUTABLE "${PYTHON}")
include(cmake/utils.cmake)
include(cmake/external_projects/deepgemm.cmake)
"""


class Tree:
    """The part of a line's patched tree that the configuration of DeepGEMM reads."""

    def __init__(self, line: str, folder: Path) -> None:
        pin = pins.load_pin(WS, line)
        self.patch = patchfile.patch_of(WS, pin)
        self.folder, self.build = folder, folder / "build"
        git, head = importer.odb(WS), stack.current(WS, pin).head
        wanted = ("cmake/utils.cmake", "cmake/external_projects/deepgemm.cmake", "tools/build_deepgemm_C.py")
        copies = [f"{patchfile.OVERLAY}/{name}" for name in ("patch_deepgemm.cmake", f"{line}.patch")]
        for name in (*wanted, *copies):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(git.raw("show", f"{head}:{name}"))
        (folder / "CMakeLists.txt").write_text(PROJECT)

    def configure(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if "DEEPGEMM" not in name} | environment
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


def test_without_the_patch_on_request(tree: Tree, tmp_path: Path) -> None:
    mine = minimal_tree.write(tree.patch, tmp_path / "mine", whole=True)
    before = minimal_tree.digest(mine)
    for options, environment in ((["-DVLLM_DSA_DEEPGEMM=OFF"], {}), ([], {"VLLM_DSA_DEEPGEMM": "OFF"})):
        done = tree.configure(f"-DDEEPGEMM_SRC_DIR={mine}", *options, **environment)
        assert done.returncode == 0 and "left as it is" in done.stdout, done.stderr
    assert minimal_tree.digest(mine) == before


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
