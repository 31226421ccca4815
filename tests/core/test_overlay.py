"""Overlay files: what is laid into a tree, and shadowing."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_lab import Project

from vllm_series import overlay
from vllm_series.errors import CheckFailed


def _put(project: Project, path: str, text: str = "x = 1\n") -> Path:
    file = project.root / "overlay" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_by_products_are_left_out(bare: Project) -> None:
    for path in ("vllm/dsa/__pycache__/a.pyc", "vllm/dsa/_dsa_C.so", "csrc/dsa/a.cu.orig", "README.md"):
        _put(bare, path)
    _put(bare, "csrc/dsa/a.cu")
    assert list(overlay.overlay_files(bare.ws)) == ["csrc/dsa/a.cu", "vllm/dsa/__init__.py"]


def test_file_outside_of_the_roots(bare: Project) -> None:
    _put(bare, "vllm/other.py")
    with pytest.raises(CheckFailed, match=r"overlay/vllm/other\.py lies outside of"):
        overlay.overlay_files(bare.ws)


def test_link_is_refused(bare: Project) -> None:
    (bare.root / "overlay/vllm/dsa/link.py").symlink_to("__init__.py")
    with pytest.raises(CheckFailed, match="not an ordinary file"):
        overlay.overlay_files(bare.ws)


@pytest.mark.parametrize(
    ("path", "tree", "hidden"),
    [
        ("vllm/dsa/a.py", ["vllm/dsa/a.py"], True),
        ("vllm/dsa/a.py", ["vllm/dsa/A.py"], True),
        ("vllm/dsa/a.py", ["vllm/dsa"], True),
        ("vllm/dsa/a.py", ["vllm/dsa/a.py/b"], True),
        ("vllm/dsa/a.py", ["vllm/dsa/b.py", "vllm/dsab/a.py"], False),
    ],
)
def test_shadowing(path: str, tree: list[str], hidden: bool) -> None:
    assert bool(overlay.shadowed([path], tree)) is hidden


def test_shadowing_overlay_stops_apply_and_verify(bare: Project) -> None:
    from core_lab import FILES, make_sdist

    bare.write_pin(make_sdist(bare.files, files={**FILES, "vllm/dsa/__init__.py": "theirs"}))
    bare.fetch()
    result = bare.series("apply", "0.9.0", code=1)
    assert "overlay/vllm/dsa/__init__.py hides vllm/dsa/__init__.py" in result.err
    assert bare.state() == "ABSENT"
    bare.lock_import()
    assert "shadow" in bare.series("verify", code=1).out


def test_a_file_that_a_patch_adds_counts_too(project: Project) -> None:
    project.apply()
    (project.tree / "vllm/dsa").mkdir(exist_ok=True)
    store_only = project.root / "overlay/vllm/dsa/extra.py"
    store_only.write_text("ours\n")
    project.apply()
    assert (project.tree / "vllm/dsa/extra.py").read_text() == "ours\n"


def test_ignored_by_upstream_is_laid_out_all_the_same(project: Project) -> None:
    """Upstream's .gitignore names ``ignored/``; an overlay file there must not get lost."""
    _put(project, "vllm/dsa/ignored/a.py")
    project.apply()
    assert (project.tree / "vllm/dsa/ignored/a.py").is_file()
    assert project.state() == "APPLIED"


def test_executable_bit_is_kept(project: Project) -> None:
    _put(project, "csrc/dsa/run.sh", "#!/bin/sh\n").chmod(0o755)
    project.apply()
    assert (project.tree / "csrc/dsa/run.sh").stat().st_mode & 0o111
    assert project.state() == "APPLIED"
