"""kill -9 at every git call of apply and export: the next run ends what was begun, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable

import pytest
from core_lab import Project, die_in_child

from vllm_series import apply as applying
from vllm_series import export as exporting
from vllm_series import export_files, files
from vllm_series.git import Git


def _kill_at_git_call(number: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a child that dies before its git call ``number``; False if it had fewer calls."""

    def child(die: Callable[[], None]) -> None:
        real, count = Git.run, 0

        def run(self: Git, *args: str, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == number:
                die()
            return real(self, *args, **kwargs)  # type: ignore[arg-type]

        Git.run = run  # type: ignore[assignment, method-assign]
        work()

    status = die_in_child(child)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _sound(project: Project, want: str) -> None:
    assert project.state() == "APPLIED"
    assert project.head_tree() == want
    assert project.git("status", "--porcelain") == ""
    assert project.git("fsck", "--strict", "--no-dangling", "--connectivity-only") == ""


def _each_call(work: Callable[[int], bool], step: int) -> int:
    number, killed = 1, 0
    while work(number):
        killed += 1
        number += step
    return killed


def test_killed_first_apply(two: Project) -> None:
    want = two.head_tree()

    def once(number: int) -> bool:
        shutil.rmtree(two.root / "build", ignore_errors=True)
        shutil.rmtree(two.root / ".work", ignore_errors=True)
        killed = _kill_at_git_call(number, lambda: applying.apply(two.ws, two.pin()))
        two.apply()
        _sound(two, want)
        assert [p.name for p in (two.root / "build").iterdir()] == ["0.9.0"], "no half-made tree is left"
        return killed

    assert _each_call(once, 7) >= 4


def test_killed_move_of_a_tree(two: Project) -> None:
    """From the applied tree to one whose overlay and patches changed on disk."""
    extra = two.root / "overlay/vllm/dsa/extra.py"
    patch = two.patches / "change-backward.patch"
    old = patch.read_bytes()
    saved = two.root.parent / "saved"
    shutil.copytree(two.tree, saved, symlinks=True)
    extra.write_text("extra = 1\n")
    (two.root / "overlay/vllm/dsa/__init__.py").write_text("NAME = 'other'\n")
    patch.write_bytes(old.replace(b"y = x - 2", b"y = x - 7"))
    two.series("lock")
    two.apply()
    want = two.head_tree()

    def once(number: int) -> bool:
        shutil.rmtree(two.tree)
        shutil.copytree(saved, two.tree, symlinks=True)
        killed = _kill_at_git_call(number, lambda: applying.apply(two.ws, two.pin()))
        two.apply()
        _sound(two, want)
        return killed

    assert _each_call(once, 3) >= 4


def test_killed_in_the_middle_of_writing_files(two: Project) -> None:
    """git itself dies half way: files half new, an index lock is left; a change of the user after that is
    kept."""
    (two.root / "overlay/vllm/dsa/extra.py").write_text("extra = 1\n")
    (two.root / "overlay/vllm/dsa/__init__.py").write_text("NAME = 'other'\n")

    def child(die: Callable[[], None]) -> None:
        real = applying.Git.run

        def run(self: Git, *args: str, **kwargs: object) -> object:
            if args[:2] == ("read-tree", "-m") and self.cwd == two.tree:
                (two.tree / "vllm/dsa/extra.py").write_text("ext")
                (two.tree / ".git/index.lock").write_text("")
                die()
            return real(self, *args, **kwargs)  # type: ignore[arg-type]

        applying.Git.run = run  # type: ignore[assignment, method-assign]
        applying.apply(two.ws, two.pin())

    assert os.WIFSIGNALED(die_in_child(child))
    assert two.state() == "PARTIAL"
    (two.tree / "vllm/envs.py").write_text("edited after the kill\n")
    result = two.series("apply", "0.9.0")
    assert "changes made after an interrupted run are kept under refs/series/saved/" in result.err
    ref = two.git("for-each-ref", "--format=%(refname)", "refs/series/saved")
    assert two.git("show", f"{ref}:vllm/envs.py") == "edited after the kill"
    assert two.state() == "APPLIED"
    assert (two.tree / "vllm/dsa/extra.py").read_text() == "extra = 1\n"


def _work_to_export(two: Project) -> None:
    two.edit("vllm/envs.py", "y = x + 2", "y = x + 3")
    two.commit("fixup! Change forward")
    two.edit("vllm/envs.py", "size = 1", "size = 2")
    from core_lab import message

    two.commit(message("Change size", "vllm/envs.py::Config.size"))
    (two.tree / "vllm/dsa/more.py").write_text("more = 1\n")
    two.commit("overlay: more")


def test_killed_export_between_git_calls(two: Project) -> None:
    _work_to_export(two)
    want, saved = two.head_tree(), two.root.parent / "saved"
    shutil.copytree(two.root, saved, symlinks=True)

    def once(number: int) -> bool:
        shutil.rmtree(two.root)
        shutil.copytree(saved, two.root, symlinks=True)
        killed = _kill_at_git_call(number, lambda: exporting.export(two.ws, two.pin()))
        two.series("export", "0.9.0")
        _sound(two, want)
        names = [row for row in (two.patches / "series").read_text().splitlines() if row[0] != "#"]
        assert names == ["change-forward.patch", "change-backward.patch", "change-size.patch"]
        assert (two.root / "overlay/vllm/dsa/more.py").read_text() == "more = 1\n"
        return killed

    assert _each_call(once, 9) >= 5
    two.series("verify")


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
def test_killed_export_between_its_files(two: Project, at: int) -> None:
    """The first file, then a patch, another patch, series, LOCK: whatever was written already is its own."""
    _work_to_export(two)
    want = two.head_tree()

    def child(die: Callable[[], None]) -> None:
        count = 0

        def write(*args: object, **kwargs: object) -> bool:
            nonlocal count
            count += 1
            if count == at:
                die()
            return files.write_atomic(*args, **kwargs)  # type: ignore[arg-type]

        export_files.write_atomic = write  # type: ignore[assignment]
        export_files.lock.write_atomic = write  # type: ignore[attr-defined]
        exporting.export(two.ws, two.pin())

    assert os.WIFSIGNALED(die_in_child(child))
    two.series("export", "0.9.0")
    _sound(two, want)
    assert (two.patches / "change-size.patch").is_file()
    assert not list(two.root.rglob("*.tmp"))
    two.series("verify")


def test_killed_dropping_export(two: Project) -> None:
    two.git("rebase", "-q", "--onto", "HEAD~2", "HEAD~1")
    want = two.head_tree()

    def child(die: Callable[[], None]) -> None:
        export_files.lock.write = lambda *args: die()  # type: ignore[assignment]
        exporting.export(two.ws, two.pin(), drop=["change-backward.patch"])

    assert os.WIFSIGNALED(die_in_child(child))
    two.series("export", "0.9.0", "--drop", "change-backward.patch")
    _sound(two, want)
    assert not (two.patches / "change-backward.patch").exists()


def test_a_second_run_waits_for_the_first(two: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_series import lock_file

    monkeypatch.setattr(lock_file, "WAIT_SECONDS", 0.3)
    with lock_file.locked(two.root / ".work/line-0.9.0.lock"):
        result = two.series("apply", "0.9.0", code=3)
    assert "another run of this tool" in result.err
    two.apply()


def test_a_ref_lock_of_a_killed_git_stops_nobody(two: Project) -> None:
    """git dies between making the lock file of a ref and renaming it, in the tree and in the object store."""
    line = two.tree.name
    (two.root / "overlay/vllm/dsa/extra.py").write_text("extra = 1\n")
    refs = two.tree / ".git/refs"
    for name in ("stamp", "next", "previous", "exporting"):
        (refs / f"series/{name}.lock").touch()
    (refs / f"heads/series/{line}.lock").touch()
    two.apply()
    want = two.head_tree()
    _sound(two, want)
    assert (two.tree / "vllm/dsa/extra.py").is_file()
    shutil.rmtree(two.tree)
    (two.ws.odb / f"refs/heads/series/{line}.lock").touch()
    two.apply()
    _sound(two, want)


def test_looking_at_a_tree_locks_nothing(two: Project) -> None:
    """A touched file makes `git status` write the index; killed meanwhile, it would leave index.lock."""
    index = two.tree / ".git/index"
    before = index.read_bytes()
    for path in (two.tree / "vllm").rglob("*.py"):
        os.utime(path, (1, 1))
    assert two.state() == "APPLIED"
    assert index.read_bytes() == before
    (two.root / "overlay/vllm/dsa/__init__.py").write_text("NAME = 'other'\n")
    two.apply()
    assert two.state() == "APPLIED" and "other" in (two.tree / "vllm/dsa/__init__.py").read_text()
