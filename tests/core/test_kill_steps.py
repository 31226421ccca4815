"""kill -9 right before one change in the file system: the moments at which a kill once stopped later runs.

sweep_kills.py tries all moments; each that it finds to do harm is listed here.
"""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from core_lab import Project
from kill_scenes import SCENES, Scene
from kills import Killer

from vllm_series import files, lock_file, scratch


@pytest.fixture(scope="module")
def killer(tmp_path_factory: pytest.TempPathFactory) -> Killer:
    return Killer(tmp_path_factory.mktemp("killer"))


# Scene -> (what, path) of the steps before which it is killed; all are named by their first occurrence.
MOMENTS = {
    "first_apply": (
        ("rename", r"odb\.git[^/]*/HEAD$"),  # HEAD.lock of a half-made store
        ("link", r"objects/pack/.*\.pack$"),  # a .keep file, with which no later import could deal
        ("rename", r"/scratch/.*/config$"),  # a half-made scratch tree
        ("unlink", r"/scratch/apply-0\.9\.0/\.git/packed-refs\.lock$"),  # one in the middle of git am
        ("rename", r"/tmp/index-[^/]*/index$"),
        ("rename", r"build/[^/]*new[^/]*/\.git/index$"),
    ),
    "move": (
        ("rename", r"build/0\.9\.0/\.git/index$"),
        ("rename", r"refs/heads/series/0\.9\.0$"),
    ),
    "export": (
        ("rename", r"odb\.git/.*refs/export/0\.9\.0$"),  # git fetch could not lock the ref any more
        ("rename", r"patches/0\.9\.0/change-size\.patch$"),  # a temporary file beside the patch
        ("rename", r"overlay/vllm/dsa/more\.py$"),
    ),
    "discard": (("rename", r"refs/series/saved/"),),
}


@pytest.mark.parametrize("name", sorted(MOMENTS))
def test_killed_at_a_bad_moment(two: Project, killer: Killer, tmp_path: Path, name: str) -> None:
    scene: Scene = SCENES[name](two)
    saved = tmp_path / "saved"
    shutil.copytree(two.root, saved, symlinks=True)
    whole = killer.series(two.root, *scene.argv)
    assert whole.code == 0, whole.said
    scene.check()
    for what, path in MOMENTS[name]:
        at = [n for n, step in enumerate(whole.steps, 1) if step[0] == what and re.search(path, step[1])]
        assert at, f"no step {what} {path} any more in {whole.steps}"
        shutil.rmtree(two.root)
        shutil.copytree(saved, two.root, symlinks=True)
        run = killer.series(two.root, *scene.argv, at=at[0])
        assert run.killed, (what, path, run.said)
        two.series(*scene.argv)
        scene.check()


def test_worktree_that_an_older_version_left_locked(two: Project) -> None:
    """What a killed `git worktree add` leaves in the store: registered, locked, with no files."""
    left = two.ws.odb / "worktrees" / "apply-0.9.0"
    left.mkdir(parents=True)
    (left / "gitdir").write_text(f"{two.ws.work}/scratch/apply-0.9.0/.git\n")
    (left / "locked").write_text("initializing")
    (left / "index.lock").touch()
    (two.ws.work / "scratch/apply-0.9.0").mkdir(parents=True)
    (two.root / "overlay/vllm/dsa/extra.py").write_text("extra = 1\n")
    (two.patches / "change-backward.patch").unlink()
    names = two.patches / "series"
    names.write_text(names.read_text().replace("change-backward.patch\n", ""))
    two.series("lock")
    two.apply()
    assert two.state() == "APPLIED"
    two.series("export", "0.9.0")


def test_temporary_folder_of_a_killed_run_goes_and_that_of_a_living_one_stays(two: Project) -> None:
    with scratch.folder(two.ws, "index") as living:
        left = living.parent / "index-left.d"
        left.mkdir()
        (left.parent / "index-old.d").mkdir()
        (left.parent / "index-old.lock").touch()
        with scratch.folder(two.ws, "mails") as other:
            assert sorted(p.name for p in living.parent.glob("*.d")) == sorted([living.name, other.name])
    assert sorted(p.name for p in living.parent.iterdir()) == ["lock"]


def test_temporary_file_of_a_killed_write_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    folder = tmp_path / "patches"
    folder.mkdir()
    for name in (".a.txt.12345678.tmp", ".b.txt.12345678.tmp"):
        (folder / name).write_text("half")
    fd, living = files._new_beside(folder / "a.txt")
    with open(fd, "wb"):  # noqa: PTH123
        files.write_atomic(folder / "a.txt", "whole")
        there = {path.name for path in folder.iterdir()}
    assert there == {"a.txt", ".b.txt.12345678.tmp", Path(living).name}


def test_children_inherit_the_locks_of_their_own_thread_alone(tmp_path: Path) -> None:
    """`series verify` checks two lines in two threads: a lock that one gives back while the other starts git
    would be a bad descriptor there."""
    with ThreadPoolExecutor(1) as other, lock_file.locked(tmp_path / "mine"):
        assert len(lock_file.held()) == 1
        assert other.submit(lock_file.held).result() == ()
    assert lock_file.held() == ()
