"""The patches of DeepGEMM: strict apply on a digest-checked tree, idempotence, refusals, the new header."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import minimal_tree
import pytest

from vllm_series import pins
from vllm_series.deepgemm import patchfile
from vllm_series.deepgemm.patchfile import DeepGemmPatch, State
from vllm_series.errors import CheckFailed, IntegrityError, UsageError
from vllm_series.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
WS = Workspace(ROOT)
NAMES = ("0.33.0", "0.28.0", "deepinfer-gemm-2.8.2")
#: Digests of the minimal trees before and after each patch: a patch that changes, changes them.
DIGESTS = {
    "0.33.0": ("ceb92442eb5a7293", "1f35259beadf4d6c"),
    "0.28.0": ("145f3ac0917f2293", "acec3bf0b43817b6"),
    "deepinfer-gemm-2.8.2": ("ede72bea0aff6f7a", "263a0ebe43c0ad34"),
}


def patch(name: str) -> DeepGemmPatch:
    return patchfile.read(ROOT / "patches" / "deepgemm" / f"{name}.patch")


@pytest.mark.parametrize("name", NAMES)
def test_applies_strictly_and_once(name: str, tmp_path: Path) -> None:
    one = patch(name)
    tree = minimal_tree.write(one, tmp_path / "src")
    assert minimal_tree.digest(tree) == DIGESTS[name][0]
    assert one.state(tree) is State.UNPATCHED
    assert one.apply(tree) is True
    assert minimal_tree.digest(tree) == DIGESTS[name][1]
    assert one.state(tree) is State.PATCHED
    assert one.apply(tree) is False
    assert minimal_tree.digest(tree) == DIGESTS[name][1]


@pytest.mark.parametrize("name", NAMES)
def test_any_other_context_is_refused_and_left_as_it_is(name: str, tmp_path: Path) -> None:
    one = patch(name)
    tree = minimal_tree.write(one, tmp_path / "src")
    for file, text in minimal_tree.files_before(one).items():
        lines = text.splitlines(keepends=True)
        known = [i for i, line in enumerate(lines) if not line.startswith("// line") and line.strip()]
        for i in known[:: max(1, len(known) // 2)]:
            (tree / file).write_text("".join([*lines[:i], lines[i].rstrip("\n") + " \n", *lines[i + 1 :]]))
            before = minimal_tree.digest(tree)
            assert one.state(tree) is State.WRONG
            with pytest.raises(CheckFailed, match="does not apply"):
                one.apply(tree)
            assert minimal_tree.digest(tree) == before
        (tree / file).write_text(text)
    assert one.state(tree) is State.UNPATCHED


def test_a_source_inside_another_repository_is_patched_too(tmp_path: Path) -> None:
    # git apply would skip all its paths, and say that all is well
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    one = patch("0.28.0")
    tree = minimal_tree.write(one, tmp_path / "build" / "deps" / "deepgemm-src")
    assert one.state(tree) is State.UNPATCHED
    assert one.apply(tree) and (tree / patchfile.MARKER).is_file()


def test_half_a_patch_is_the_wrong_source(tmp_path: Path) -> None:
    one = patch("0.33.0")
    tree = minimal_tree.write(one, tmp_path)
    one.apply(tree)
    (tree / patchfile.MARKER).unlink()
    assert one.state(tree) is State.WRONG


def test_no_folder_and_no_header_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        patch("0.28.0").apply(tmp_path / "nowhere")
    (tmp_path / "x.patch").write_text("diff --git a/x b/x\n")
    with pytest.raises(CheckFailed, match="Applies-To"):
        patchfile.read(tmp_path / "x.patch")


def test_patches_belong_to_the_pins_and_cmake_reads_the_same_ones(tmp_path: Path) -> None:
    for line in ("0.33.0", "0.28.0"):
        assert patchfile.patch_of(WS, pins.load_pin(WS, line)).name == line
    patchfile.check_copies(WS)
    for folder in ("pins", "patches", "overlay/csrc"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    ws = Workspace(tmp_path)
    pin = tmp_path / "pins/0.33.0.toml"
    pin.write_text(pin.read_text().replace("0820030756945b2d", "1820030756945b2d"))
    with pytest.raises(IntegrityError, match=r"pins .* 1820030756945b2d"):
        patchfile.patch_of(ws, pins.load_pin(ws, "0.33.0"))
    copy = tmp_path / "overlay/csrc/dsa/deepgemm/0.28.0.patch"
    copy.write_text(copy.read_text() + "\n")
    with pytest.raises(CheckFailed, match=r"0\.28\.0\.patch is not"):
        patchfile.check_copies(ws)


def test_all_patches_add_the_same_header(tmp_path: Path) -> None:
    found = set()
    for name in NAMES:
        tree = minimal_tree.write(patch(name), tmp_path / name)
        patch(name).apply(tree)
        found.add((tree / patchfile.MARKER).read_bytes())
    assert len(found) == 1


#: What the header asks of a tensor, so that its refusals are compiled and run without torch.
PROGRAM = r"""
#include <cstdio>
#include <vector>
#include "mqa_logits_out.hpp"

enum class Scalar { Float, BFloat16, Half };
struct Tensor {
    int where; Scalar dtype; std::vector<std::int64_t> sizes; bool dense; std::uintptr_t at;
    int device() const { return where; }
    Scalar scalar_type() const { return dtype; }
    std::int64_t dim() const { return sizes.size(); }
    std::int64_t size(int i) const { return sizes[i]; }
    bool is_contiguous() const { return dense; }
    const void* const_data_ptr() const { return reinterpret_cast<const void*>(at); }
};

void show(const Tensor& out, Scalar dtype = Scalar::Float) {
    const Tensor q{0, Scalar::Half, {7, 32, 128}, true, 0};
    try {
        deep_gemm::attention::mqa_logits_buffer(out, q, dtype, std::int64_t{8}, std::int64_t{1} << 30);
        std::puts("ok");
    } catch (const std::exception& error) {
        std::puts(error.what());
    }
}

int main() {
    const std::int64_t row = std::int64_t{1} << 30;
    show({0, Scalar::Float, {8, row}, true, 4096});
    show({0, Scalar::Float, {9, row}, true, 4096});
    show({0, Scalar::BFloat16, {8, row}, true, 4096}, Scalar::BFloat16);
    show({1, Scalar::Float, {8, row}, true, 4096});
    show({0, Scalar::Half, {8, row}, true, 4096});
    show({0, Scalar::Float, {8 * row}, true, 4096});
    show({0, Scalar::Float, {8, row}, false, 4096});
    show({0, Scalar::Float, {7, row}, true, 4096});
    show({0, Scalar::Float, {8, row + 256}, true, 4096});
    show({0, Scalar::Float, {8, row}, true, 4096 + 256});
    show({0, Scalar::Half, {8, row}, true, 4096}, Scalar::BFloat16);
}
"""


def test_the_header_accepts_and_refuses(tmp_path: Path) -> None:
    one = patch("0.33.0")
    tree = minimal_tree.write(one, tmp_path / "src")
    one.apply(tree)
    (tmp_path / "main.cpp").write_text(PROGRAM)
    program = tmp_path / "main"
    include = f"-I{tree / 'csrc/apis'}"
    argv = [
        "g++",
        "-std=c++20",
        "-Wall",
        "-Wextra",
        "-Werror",
        include,
        str(tmp_path / "main.cpp"),
        "-o",
        program,
    ]
    subprocess.run(argv, check=True)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[:3] == ["ok"] * 3
    float32 = "contiguous float32 tensor of at least [8, 1073741824] (34359738368 bytes; rows of exactly"
    reasons = (
        "is on another device",
        "has another dtype",
        "has 1 dimensions",
        "is not contiguous",
        "is [7, 1073741824]",
        "is [8, 1073742080]",
        "does not start at a multiple of 512 bytes",
    )
    for line, reason in zip(said[3:10], reasons, strict=True):
        assert float32 in line and line.endswith(f"but it {reason}")
    assert "contiguous bfloat16 tensor of at least [8, 1073741824] (17179869184 bytes" in said[10]


def test_the_hook_of_each_line_names_its_own_patch() -> None:
    for line in ("0.33.0", "0.28.0"):
        hook = (ROOT / "patches" / line / "deepgemm-build.patch").read_text()
        assert f"+vllm_dsa_patch_deepgemm({line} " in hook
        assert (ROOT / "overlay" / patchfile.OVERLAY / f"{line}.patch").is_file()
