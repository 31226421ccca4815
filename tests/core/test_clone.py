"""`series apply LINE --git URL`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from core_lab import COMMIT, FILES, SCRIPTS, Project

from vllm_series import clone, sdist
from vllm_series.errors import IntegrityError
from vllm_series.git import Git


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A git repository of upstream: the files of the sdist, one that it lacks, a tag, and later work."""
    folder = tmp_path / "upstream"
    for name, text in {**FILES, **SCRIPTS, "docs/only-in-git.md": "x\n"}.items():
        if not sdist.is_generated(name):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
    (folder / "setup.sh").chmod(0o755)
    git = Git(folder)
    git.run("init", "-q", ".")
    git.run("add", "-A", "-f")
    git.run("commit", "-q", "-m", "release")
    git.run("tag", "-a", "-m", "release", "v0.9.0")
    (folder / "README.md").write_text("later\n")
    git.run("commit", "-q", "-a", "-m", "later")
    return folder


def _pin_to(project: Project, upstream: Path, name: str = "v0.9.0^{commit}") -> str:
    """Let pin and sdist name the clone's commit."""
    from core_lab import make_sdist

    commit = Git(upstream).out("rev-parse", name)
    version = FILES["vllm/_version.py"].replace(COMMIT, commit[:9])
    project.write_pin(
        make_sdist(project.files, files={**FILES, "vllm/_version.py": version}), commit=commit[:9]
    )
    project.fetch()
    project.lock_import()
    project.series("lock")
    return commit


def test_the_clone_gives_the_whole_tree(two: Project, upstream: Path) -> None:
    commit = _pin_to(two, upstream)
    shutil.rmtree(two.tree)
    result = two.series("apply", "0.9.0", "--git", str(upstream))
    assert f"commit {commit[:12]}" in result.err
    assert "1 more, 0 only in the sdist" in result.err
    assert (two.tree / "docs/only-in-git.md").is_file()
    assert (two.tree / "README.md").read_text() == FILES["README.md"]
    assert "y = x - 2" in (two.tree / "vllm/envs.py").read_text()
    assert two.state() == "APPLIED"
    assert commit in two.git("log", "--format=%B", "--max-parents=0")


def test_a_tree_of_a_clone_stays_one_and_exports_the_same(two: Project, upstream: Path) -> None:
    _pin_to(two, upstream)
    shutil.rmtree(two.tree)
    two.series("apply", "0.9.0", "--git", str(upstream))
    shutil.rmtree(two.root / ".work")
    assert "nothing to do" in two.series("apply", "0.9.0").out
    before = two.snapshot()
    two.series("export", "0.9.0")
    assert two.snapshot() == before
    two.edit("vllm/envs.py", "y = x + 2", "y = x + 3")
    two.commit("fixup! Change forward")
    two.series("export", "0.9.0")
    assert two.state() == "APPLIED"
    assert (two.tree / "docs/only-in-git.md").is_file()
    two.series("verify")


def test_commit_that_no_ref_points_at(two: Project, upstream: Path) -> None:
    Git(upstream).run("tag", "-d", "v0.9.0")
    _pin_to(two, upstream, "HEAD~1")
    two.series("apply", "0.9.0", "--git", str(upstream))
    assert two.state() == "APPLIED"


def test_clone_without_the_commit(two: Project, upstream: Path) -> None:
    result = two.series("apply", "0.9.0", "--git", str(upstream), code=2)
    assert f"does not have the pinned commit {COMMIT}" in result.err


def test_clone_that_cannot_be_read(two: Project, tmp_path: Path) -> None:
    assert "cannot read" in two.series("apply", "0.9.0", "--git", str(tmp_path / "none"), code=6).err
    err = two.series("apply", "0.9.0", "--git", "http://me:secret@127.0.0.1:9/x.git", code=6).err
    assert "secret" not in err.splitlines()[0]


def test_file_that_differs_from_the_sdist(two: Project, upstream: Path) -> None:
    git = Git(upstream)
    git.run("checkout", "-q", "v0.9.0")
    (upstream / "vllm/layers.py").write_text("evil\n")
    git.run("commit", "-q", "-a", "-m", "evil")
    git.run("tag", "evil")
    _pin_to(two, upstream, "evil")
    result = two.series("apply", "0.9.0", "--git", str(upstream), code=4)
    assert "differs from the sdist in 1 files: vllm/layers.py" in result.err


def test_other_repository(two: Project, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    git = Git(folder)
    git.run("init", "-q", ".")
    (folder / "x").write_text("x")
    git.run("add", "-A")
    git.run("commit", "-q", "-m", "x")
    _pin_to(two, folder, "HEAD")
    with pytest.raises(IntegrityError, match="has no file of the sdist"):
        clone.base_from(two.ws, two.pin(), str(folder))
