"""The real 0.28.0 and 0.33.0 releases: import, apply, export and verify of this repository's own series."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest
from core_lab import Project
from kills import Killer

from vllm_series import apply as applying
from vllm_series import importer, state, verify
from vllm_series.git import Git
from vllm_series.pins import load_pin
from vllm_series.workspace import Workspace

pytestmark = pytest.mark.slow


def test_verify_of_both_lines_from_nothing(real: Workspace) -> None:
    """Fetch, import and every check, in a checkout that has neither object store nor trees."""
    found = verify.verify(real, ["0.33.0", "0.28.0"])
    failed = [
        f"{line}: {step.name}: {step.error}" for line, steps in found.items() for step in steps if not step.ok
    ]
    assert failed == []
    assert all(len(steps) == 11 for steps in found.values())


@pytest.mark.parametrize("line", ["0.28.0", "0.33.0"])
def test_import_equals_a_plain_git_add_of_the_unpacked_sdist(
    real: Workspace, line: str, tmp_path: Path
) -> None:
    """git add of what tar unpacks gives the pinned tree: the importer's own reading of the archive is
    right."""
    from vllm_series import fetch, sdist

    pin = load_pin(real, line)
    archive = fetch.fetch(real, pin.source.sdist)
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(tmp_path)], check=True)
    folder = tmp_path / f"vllm-{line}"
    for name in sdist.GENERATED:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    git = Git(folder)
    git.run("init", "-q", ".")
    git.run("add", "-f", "-A")
    assert git.out("write-tree") == pin.source.tree


def test_apply_edit_export_on_the_real_tree(real: Workspace) -> None:
    line = "0.33.0"
    project = Project(real.root, real.root, line)
    project.apply()
    assert project.state() == "APPLIED"
    before = project.snapshot()
    project.series("export", line)
    assert project.snapshot() == before, "apply then export changes nothing"
    path = "vllm/v1/core/sched/scheduler.py"
    project.edit(path, "    def schedule(", "    series_test_marker = 1\n\n    def schedule(")
    trailers = (
        "Feature: core\nOrigin: none [test]\nUpstream-Status: Inappropriate [test]\n"
        f"Anchor: {path}::Scheduler\nDrop-When: never\nLive-When: symbol:{path}::Scheduler.schedule"
    )
    project.commit(f"Mark the scheduler\n\nFor a test.\n\n{trailers}\n")
    want = project.head_tree()
    project.series("export", line)
    assert project.head_tree() == want
    assert project.snapshot().keys() - before.keys() == {f"patches/{line}/mark-the-scheduler.patch"}
    changed = {name for name, data in before.items() if project.snapshot()[name] != data}
    assert changed == {f"patches/{line}/LOCK", f"patches/{line}/series"}
    project.series("verify", line)


def test_apply_killed_while_it_writes_thousands_of_files(real: Workspace, tmp_path: Path) -> None:
    """The process group dies at changes in the file system drawn by lot; running it again ends well."""
    line, killer, dice = "0.28.0", Killer(tmp_path), random.Random(2026)
    importer.import_pin(real, load_pin(real, line))
    project = Project(real.root, real.root, line)

    def killed_then_whole(at: list[int]) -> None:
        for number in at:
            run = killer.series(real.root, "apply", line, at=number)
            assert run.killed, f"it ended before step {number} of {at}: {run.said}"
        project.apply()
        assert project.state() == "APPLIED", f"after kills at {at}"
        assert project.git("status", "--porcelain") == "", f"after kills at {at}"
        assert [p.name for p in (real.root / "build").iterdir()] == [line]
        assert not list((real.work / "scratch").iterdir())

    killed_then_whole([dice.randrange(50, 400), dice.randrange(400, 4000)])
    # Now the move of a tree that is there: nothing of the overlay -> all of it.
    back = project.git("rev-parse", f"series/{line}~1")

    def undo() -> None:
        project.git("reset", "-q", "--hard", back)

    undo()
    steps = len(killer.series(real.root, "apply", line).steps)
    assert steps > 20
    for number in sorted(dice.sample(range(1, steps + 1), 2)):
        undo()
        killed_then_whole([number])


def test_tool_refuses_another_lines_patches(real: Workspace) -> None:
    """0.28.0's patches on 0.33.0: a clear error, no tree."""
    for path in (real.root / "patches/0.33.0").glob("*.patch"):
        path.unlink()
    for path in (real.root / "patches/0.28.0").iterdir():
        shutil.copy(path, real.root / "patches/0.33.0" / path.name)
    project = Project(real.root, real.root, "0.33.0")
    result = project.series("apply", "0.33.0", code=None)
    assert result.code in {1, 4}
    assert "fix:" in result.err
    assert state.inspect(real, load_pin(real, "0.33.0")).state is state.State.ABSENT


def test_warm_apply_is_a_no_op(real: Workspace) -> None:
    line = "0.33.0"
    applying.apply(real, load_pin(real, line))
    files = [real.build(line) / name for name in (".git/index", ".git/HEAD", "vllm/envs.py")]
    before = [path.stat().st_mtime_ns for path in files]
    again = applying.apply(real, load_pin(real, line))
    assert again.changed is False
    assert [path.stat().st_mtime_ns for path in files] == before
