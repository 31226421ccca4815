"""What replaces upstream's DeepGEMM in a wheel: all of it or nothing, and only what this checkout built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_series import pins
from vllm_series.deepgemm import build, bundle, patchfile, source
from vllm_series.errors import CheckFailed, FetchFailed, UsageError
from vllm_series.wheel import gather, provenance, repack
from vllm_series.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
WS = Workspace(ROOT)
PATCHED = b"\x7fELF fp8_fp4_mqa_logits_out\0"
PYTHONS = ("310", "311", "312", "313", "314")


def patch(line: str) -> patchfile.DeepGemmPatch:
    return patchfile.patch_of(WS, pins.load_pin(WS, line))


def names(line: str) -> list[str]:
    if line == "0.33.0":
        return ["_C.py", "_C_extension.abi3.so"]
    return [f"_C.cpython-{python}-x86_64-linux-gnu.so" for python in PYTHONS]


def made(folder: Path, line: str) -> Path:
    folder.mkdir()
    for name in names(line):
        (folder / name).write_bytes(PATCHED + name.encode())
    bundle.save(folder, line, patch(line), {"torch": "2.13.0+cu130", "cuda": "13.0"})
    return folder


def members(line: str) -> list[str]:
    return [bundle.PACKAGE + name for name in ("__init__.py", *names(line))]


@pytest.mark.parametrize("line", ["0.33.0", "0.28.0"])
def test_a_whole_bundle(line: str, tmp_path: Path) -> None:
    found = bundle.load(made(tmp_path / "built", line), line, patch(line), members(line))
    assert list(found.files) == [bundle.PACKAGE + name for name in sorted(names(line))]
    assert found.record["patch"]["sha256"] == patch(line).digest
    assert str(tmp_path) not in json.dumps(found.record)


def test_all_extensions_or_none(tmp_path: Path) -> None:
    folder = tmp_path / "built"
    folder.mkdir()
    for name in names("0.28.0")[1:3]:
        (folder / name).write_bytes(PATCHED)
    bundle.save(folder, "0.28.0", patch("0.28.0"), {})
    with pytest.raises(
        CheckFailed, match=r"lacks _C\.cpython-310.*313.*314.*all extensions of DeepGEMM or none"
    ):
        bundle.load(folder, "0.28.0", patch("0.28.0"), members("0.28.0"))


def test_refusals(tmp_path: Path) -> None:
    folder = made(tmp_path / "built", "0.33.0")

    def load(line: str = "0.33.0", with_patch: str = "0.33.0") -> bundle.Bundle:
        return bundle.load(folder, line, patch(with_patch), members(line))

    with pytest.raises(CheckFailed, match=r"DeepGEMM of line 0\.33\.0, not 0\.28\.0"):
        load("0.28.0")
    with pytest.raises(CheckFailed, match="built with another"):
        load(with_patch="0.28.0")
    with pytest.raises(CheckFailed, match="which upstream's wheel has not"):
        bundle.load(folder, "0.33.0", patch("0.33.0"), [bundle.PACKAGE + "_C.py"])
    (folder / "_C.py").write_text("changed")
    with pytest.raises(CheckFailed, match="was changed after it was built"):
        load()
    (folder / "_C.py").unlink()
    with pytest.raises(UsageError, match="has no built DeepGEMM"):
        load()
    (folder / bundle.MANIFEST).write_text("[]")
    with pytest.raises(CheckFailed, match="cannot be read"):
        load()


def test_an_unpatched_extension_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "_C_extension.abi3.so").write_bytes(b"\x7fELF fp8_fp4_mqa_logits\0")
    with pytest.raises(CheckFailed, match="not built from a patched source"):
        bundle.save(tmp_path, "0.33.0", patch("0.33.0"), {})
    (tmp_path / "_C_extension.abi3.so").unlink()
    with pytest.raises(CheckFailed, match="has no extension"):
        bundle.save(tmp_path, "0.33.0", patch("0.33.0"), {})


def test_sources(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="submodule update"):
        source.copied(tmp_path, tmp_path / "copy")
    gone = patchfile.DeepGemmPatch(
        tmp_path / "x.patch", "git", (tmp_path / "none.git").as_uri(), "0" * 40, ""
    )
    with pytest.raises(FetchFailed, match="cannot be fetched") as caught:
        source.cloned(gone, [], tmp_path / "clone")
    assert "DEEPGEMM_SRC_DIR" in str(caught.value.fix)
    text = 'GIT_SUBMODULES "third-party/cutlass" "third-party/fmt"\n GIT_PROGRESS TRUE'
    assert source.submodules(text) == ["third-party/cutlass", "third-party/fmt"]


def test_the_build_asks_for_the_line_s_torch(tmp_path: Path) -> None:
    python = tmp_path / "python"
    pin = pins.load_pin(WS, "0.33.0")
    for facts, message in (
        (
            '{"torch": "2.13.0+cu130", "cuda": "13.0"}',
            r"has torch 2\.13\.0\+cu130, line 0\.33\.0 needs 2\.14",
        ),
        ('{"torch": "2.14.0+cpu", "cuda": null}', "for CUDA"),
    ):
        python.write_text(f"#!/bin/sh\necho '{facts}'\n")
        python.chmod(0o755)
        with pytest.raises(UsageError, match=message):
            build.torch_facts(python, pin)
    python.write_text('#!/bin/sh\necho \'{"torch": "2.14.1+cu130", "cuda": "13.0"}\'\n')
    assert build.torch_facts(python, pin) == {"torch": "2.14.1+cu130", "cuda": "13.0"}


@pytest.mark.slow
def test_the_real_wheel_of_the_compiled_line_gets_all_five(tmp_path: Path) -> None:
    folder = made(tmp_path / "built", "0.28.0")
    recipe = gather.gather(WS, "0.28.0", "x86_64", with_kernels=False, deepgemm_folder=folder)
    changed = repack.new_members(recipe)
    extensions = {name: data for name, data in changed.items() if name.startswith(bundle.PACKAGE)}
    assert extensions == {bundle.PACKAGE + name: PATCHED + name.encode() for name in names("0.28.0")}
    assert recipe.name.build == "0nokernels_deepgemm" and recipe.name.has_deepgemm
    assert provenance.parse(changed[provenance.PATH])["deepgemm"]["patch"]["name"] == "0.28.0.patch"
    (folder / names("0.28.0")[0]).unlink()
    with pytest.raises(UsageError):
        gather.gather(WS, "0.28.0", "x86_64", with_kernels=False, deepgemm_folder=folder)
