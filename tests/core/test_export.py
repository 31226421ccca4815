"""Export: commits become patches, bytes stay where the effect stays, nothing is lost."""

from __future__ import annotations

import re
import shutil

import pytest
from core_lab import TRAILERS, Project, message

from vllm_series import export_files


def test_first_export(patched: Project) -> None:
    data = (patched.patches / "change-forward.patch").read_bytes()
    assert data.startswith(
        b"From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\nFrom: U <u@x>\n"
    )
    assert re.search(rb"\nindex [0-9a-f]{40}\.\.[0-9a-f]{40} 100644\n", data)
    assert b"\n-- \n" not in data
    assert (patched.patches / "series").read_text() == "# Patches of the test line.\nchange-forward.patch\n"
    assert patched.state() == "APPLIED"
    patched.series("verify")


def test_without_a_tree_no_work_is_at_stake(two: Project) -> None:
    shutil.rmtree(two.tree)
    result = two.series("export", "0.9.0", code=2)
    assert "ABSENT: there is no tree yet" in result.err and "fix: series apply 0.9.0" in result.err


def test_apply_then_export_changes_nothing(two: Project) -> None:
    before = two.snapshot()
    result = two.series("export", "0.9.0")
    assert "nothing to export" in result.out
    assert two.snapshot() == before


def test_export_then_apply_gives_the_same_tree(two: Project) -> None:
    two.edit("vllm/envs.py", "size = 1", "size = 2")
    (two.tree / "vllm/dsa/more.py").write_text("more = 1\n")
    two.git("add", "-A", "vllm/envs.py")
    two.git("commit", "-q", "-m", message("Change size", "vllm/envs.py::Config.size"))
    two.commit("overlay: more")
    want = two.head_tree()
    two.series("export", "0.9.0")
    assert two.head_tree() == want
    shutil.rmtree(two.root / "build")
    shutil.rmtree(two.root / ".work")
    two.apply()
    assert two.head_tree() == want


def test_a_commit_without_fixup_is_said_to_be_a_new_patch(two: Project) -> None:
    """Who only wanted to change a patch learns how; what it names puts it right."""
    two.edit("vllm/envs.py", "y = x + 2", "y = x + 3")
    dirty = two.series("export", "0.9.0", code=5)
    assert "with --fixup COMMIT a change of that patch" in dirty.err
    two.commit("Tweak")
    said = two.series("export", "0.9.0").out
    assert "added: tweak.patch" in said and "series export 0.9.0 --drop tweak.patch" in said
    rows = two.git("log", "--reverse", "--format=%H %s").splitlines()
    base, forward, backward, tweak = (row.split()[0] for row in rows[:4])
    assert [row.partition(" ")[2] for row in rows[1:4]] == ["Change forward", "Change backward", "Tweak"]
    todo = two.root / "todo"
    todo.write_text(f"pick {forward}\nfixup {tweak}\npick {backward}\n")
    two.git("-c", f"sequence.editor=cp '{todo}'", "rebase", "-q", "-i", base)
    result = two.series("export", "0.9.0", "--drop", "tweak.patch", "--json").json
    assert (result["rewritten"], result["dropped"]) == (["change-forward.patch"], ["tweak.patch"])


def test_only_the_patch_that_changed_is_rewritten(two: Project) -> None:
    other = (two.patches / "change-backward.patch").read_bytes()
    two.edit("vllm/envs.py", "y = x + 2", "y = x + 3")
    two.commit("fixup! Change forward")
    result = two.series("export", "0.9.0", "--json").json
    assert result["rewritten"] == ["change-forward.patch"]
    assert result["added"] == result["dropped"] == []
    assert (two.patches / "change-backward.patch").read_bytes() == other
    assert two.git("log", "--format=%s") == "overlay\nChange backward\nChange forward\nvLLM 0.9.0"
    assert two.state() == "APPLIED"


def test_line_numbers_that_move_do_not_rewrite_a_patch(two: Project) -> None:
    """A patch earlier in the series grows by lines; the later one keeps its bytes although its offsets
    moved."""
    later = (two.patches / "change-backward.patch").read_bytes()
    two.edit("vllm/envs.py", "import os\n", "import os\nimport re\nimport sys\n")
    two.git("add", "-A")
    two.git("commit", "-q", "-m", "fixup! Change forward")
    two.series("export", "0.9.0")
    assert (two.patches / "change-backward.patch").read_bytes() == later
    two.apply()
    assert "import sys" in (two.tree / "vllm/envs.py").read_text()


def test_odd_header_bytes_stay(two: Project) -> None:
    path = two.patches / "change-backward.patch"
    data = path.read_bytes().replace(b"Subject:", b"X-Credit: someone <s@x>\nSubject:", 1)
    path.write_bytes(data)
    two.series("lock")
    two.apply()
    two.edit("vllm/envs.py", "y = x + 2", "y = x + 3")
    two.commit("fixup! Change forward")
    two.series("export", "0.9.0")
    assert path.read_bytes() == data


def test_squash_and_amend_commits(two: Project) -> None:
    two.edit("vllm/envs.py", "y = x + 2", "y = x + 4")
    two.commit("squash! Change forward\n\nmore words")
    two.edit("vllm/envs.py", "y = x - 2", "y = x - 4")
    two.commit("amend! Change backward\n\n" + message("Change backward anew"))
    result = two.series("export", "0.9.0", "--json").json
    assert result["rewritten"] == ["change-forward.patch", "change-backward.patch"]
    assert result["added"] == result["dropped"] == []
    assert two.git("log", "--format=%s", "-2", "HEAD~1") == "Change backward anew\nChange forward"
    assert "# This is" not in (two.patches / "change-forward.patch").read_text()
    assert "y = x - 4" in (two.tree / "vllm/envs.py").read_text()


def test_reworded_subject_keeps_the_file_name(two: Project) -> None:
    two.git("reset", "-q", "--hard", "HEAD~1")
    two.git("commit", "-q", "--amend", "-m", message("A better subject"))
    result = two.series("export", "0.9.0", "--json").json
    assert result["rewritten"] == ["change-backward.patch"]
    assert result["added"] == []


def test_empty_export_is_refused(two: Project) -> None:
    before = two.snapshot()
    two.git("revert", "--no-edit", "HEAD~1")
    two.git("reset", "-q", "--hard", "HEAD~1")
    base = two.git("rev-list", "--max-parents=0", "HEAD")
    two.git("reset", "-q", "--hard", base)
    (two.tree / "vllm/dsa").mkdir(exist_ok=True)
    (two.tree / "vllm/dsa/x.py").write_text("x = 1\n")
    two.commit("overlay only")
    result = two.series("export", "0.9.0", code=1)
    assert "would remove all 2 patches" in result.err
    assert two.snapshot() == before


def test_dropped_patch_is_refused_until_agreed(two: Project) -> None:
    before = two.snapshot()
    two.git("rebase", "-q", "--onto", "HEAD~2", "HEAD~1")
    result = two.series("export", "0.9.0", code=5)
    assert "change-backward.patch" in result.err
    assert "--drop change-backward.patch" in result.err
    assert two.snapshot() == before
    two.series("export", "0.9.0", "--drop", "change-backward.patch")
    assert (two.patches / "series").read_text().splitlines()[1:] == ["change-forward.patch"]
    assert not (two.patches / "change-backward.patch").exists()
    assert two.state() == "APPLIED"
    two.series("verify")


def test_a_commit_that_mixes_overlay_and_upstream_is_refused(two: Project) -> None:
    two.edit("vllm/envs.py", "size = 1", "size = 2")
    (two.tree / "vllm/dsa/more.py").write_text("more = 1\n")
    two.commit("Both at once")
    before = two.snapshot()
    result = two.series("export", "0.9.0", code=1)
    assert "touches overlay files (vllm/dsa/more.py) and upstream files (vllm/envs.py)" in result.err
    assert "split it" in result.err
    assert two.snapshot() == before


def test_empty_commit_and_merge_are_refused(two: Project) -> None:
    two.git("commit", "-q", "--allow-empty", "-m", "Nothing")
    assert "changes nothing" in two.series("export", "0.9.0", code=1).err
    two.git("reset", "-q", "--hard", "HEAD~1")
    two.git("checkout", "-q", "-b", "side", "HEAD~1")
    two.edit("README.md", "upstream", "Upstream")
    two.commit("Side")
    two.git("checkout", "-q", "series/0.9.0")
    two.git("merge", "-q", "--no-edit", "side")
    assert "merge commits" in two.series("export", "0.9.0", code=1).err


def test_fixup_that_conflicts_needs_a_person(two: Project) -> None:
    two.edit("vllm/envs.py", "y = x - 2", "y = x - 5")
    two.commit("fixup! Change forward")
    head = two.git("rev-parse", "HEAD")
    before = two.snapshot()
    result = two.series("export", "0.9.0", code=3)
    assert "vllm/envs.py" in result.err
    assert "rebase -i --autosquash" in result.err
    assert two.git("rev-parse", "HEAD") == head
    assert two.snapshot() == before


def test_fixup_without_target(two: Project) -> None:
    two.edit("README.md", "upstream", "Upstream")
    two.commit("fixup! No such patch")
    assert "no commit to squash into" in two.series("export", "0.9.0", code=1).err


def test_overlay_edits_go_back_to_the_overlay(two: Project) -> None:
    lock = (two.patches / "LOCK").read_bytes()
    (two.tree / "vllm/dsa/__init__.py").write_text("NAME = 'new'\n")
    (two.tree / "vllm/dsa/tool.sh").write_text("#!/bin/sh\n")
    (two.tree / "vllm/dsa/tool.sh").chmod(0o755)
    two.commit("overlay: edit")
    two.series("export", "0.9.0")
    assert (two.root / "overlay/vllm/dsa/__init__.py").read_text() == "NAME = 'new'\n"
    assert (two.root / "overlay/vllm/dsa/tool.sh").stat().st_mode & 0o111
    assert (two.patches / "LOCK").read_bytes() == lock, "the overlay is not part of LOCK"
    two.git("rm", "-q", "vllm/dsa/tool.sh")
    two.git("commit", "-q", "-m", "overlay: remove")
    two.series("export", "0.9.0")
    assert not (two.root / "overlay/vllm/dsa/tool.sh").exists()
    assert two.state() == "APPLIED"


def test_overlay_changed_on_both_sides_is_refused(two: Project) -> None:
    (two.tree / "vllm/dsa/__init__.py").write_text("NAME = 'tree'\n")
    two.commit("overlay: edit")
    (two.root / "overlay/vllm/dsa/__init__.py").write_text("NAME = 'disk'\n")
    result = two.series("export", "0.9.0", code=5)
    assert "changed both in build/0.9.0 and in overlay/: vllm/dsa/__init__.py" in result.err
    assert (two.root / "overlay/vllm/dsa/__init__.py").read_text() == "NAME = 'disk'\n"


def test_other_overlay_files_may_change_on_disk_meanwhile(two: Project) -> None:
    (two.root / "overlay/vllm/dsa/disk.py").write_text("disk = 1\n")
    two.edit("vllm/envs.py", "y = x + 2", "y = x + 3")
    two.commit("fixup! Change forward")
    two.series("export", "0.9.0")
    assert (two.root / "overlay/vllm/dsa/disk.py").read_text() == "disk = 1\n"
    assert (two.tree / "vllm/dsa/disk.py").read_text() == "disk = 1\n"
    assert two.state() == "APPLIED"


def test_patches_changed_on_disk_since_apply_are_not_overwritten(two: Project) -> None:
    path = two.patches / "change-backward.patch"
    data = path.read_bytes().replace(b"+        y = x - 2", b"+        y = x - 9")
    path.write_bytes(data)
    two.edit("vllm/envs.py", "y = x + 2", "y = x + 3")
    two.commit("fixup! Change forward")
    result = two.series("export", "0.9.0", code=5)
    assert "changed since build/0.9.0 was applied (change-backward.patch)" in result.err
    assert path.read_bytes() == data


def test_order_of_commits_is_the_order_of_the_series(two: Project) -> None:
    two.git("checkout", "-q", "--detach", "HEAD~3")
    two.git("cherry-pick", "series/0.9.0~1", "series/0.9.0~2", "series/0.9.0")
    two.git("checkout", "-q", "-B", "series/0.9.0")
    two.series("export", "0.9.0")
    rows = (two.patches / "series").read_text().splitlines()
    assert rows[1:] == ["change-backward.patch", "change-forward.patch"]
    assert two.state() == "APPLIED"


def test_comments_of_the_series_stay_with_their_patch(two: Project) -> None:
    text = (
        "# Head.\n\n# about forward\nchange-forward.patch\n# about backward\nchange-backward.patch\n# end\n"
    )
    (two.patches / "series").write_text(text)
    assert (
        export_files.series_text(two.ws, "0.9.0", ["change-forward.patch", "change-backward.patch"]) == text
    )
    assert export_files.series_text(two.ws, "0.9.0", ["new.patch", "change-backward.patch"]) == (
        "# Head.\n\nnew.patch\n# about backward\nchange-backward.patch\n# end\n"
    )


def test_new_file_rename_and_mode_change(project: Project) -> None:
    project.apply()
    project.git("mv", "vllm/layers.py", "vllm/layer.py")
    (project.tree / "vllm/fresh.py").write_text("a = 1\n")
    (project.tree / "README.md").chmod(0o755)
    anchors = (
        "Anchor: vllm/layer.py::\nAnchor: vllm/layers.py::\nAnchor: vllm/fresh.py::\nAnchor: README.md::"
    )
    project.commit(f"Move\n\nWhy.\n\n{TRAILERS.replace('Anchor: vllm/envs.py::Config.forward', anchors)}")
    want = project.head_tree()
    project.series("export", "0.9.0")
    shutil.rmtree(project.tree)
    project.apply()
    assert project.head_tree() == want
    project.series("verify")


def test_full_disk_while_writing_keeps_the_commits(two: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    two.edit("vllm/envs.py", "y = x + 2", "y = x + 3")
    two.commit("fixup! Change forward")
    before = two.snapshot()

    def full(*args: object, **kwargs: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_files, "write_atomic", full)
    result = two.series("export", "0.9.0", code=6)
    assert "no space left" in result.err
    assert "your commits in build/0.9.0 are safe" in result.err
    assert two.snapshot() == before
    monkeypatch.undo()
    two.series("export", "0.9.0")
    assert b"y = x + 3" in (two.patches / "change-forward.patch").read_bytes()


def test_a_patch_that_does_not_apply_is_made_anew(two: Project) -> None:
    """What the error message says, step by step."""
    path, other = two.patches / "change-forward.patch", (two.patches / "change-backward.patch").read_bytes()
    path.write_bytes(path.read_bytes().replace(b" def forward", b" def forwards"))
    result = two.series("apply", "0.9.0", code=1)
    assert "series apply 0.9.0 --before change-forward.patch" in result.err
    assert "series export 0.9.0 --as change-forward.patch" in result.err
    two.series("apply", "0.9.0", "--before", "change-forward.patch")
    assert "not exactly" not in two.series("export", "0.9.0", "--as", "change-forward.patch", code=1).err
    two.edit("vllm/envs.py", "y = x + 1", "y = x + 5")
    two.commit(message("Change forward", "vllm/envs.py::Config.forward"))
    assert "--as PATCH" in two.series("export", "0.9.0", code=5).err
    two.series("export", "0.9.0", "--as", "nope.patch", code=2)
    two.series("export", "0.9.0", "--as", "change-forward.patch")
    assert two.state() == "PARTIAL"
    two.series("lock")
    two.apply()
    assert two.state() == "APPLIED"
    assert "y = x + 5" in (two.tree / "vllm/envs.py").read_text()
    assert (two.patches / "change-backward.patch").read_bytes() == other
    two.series("verify")


def test_making_a_patch_anew_needs_the_tree_for_it(two: Project) -> None:
    result = two.series("export", "0.9.0", "--as", "change-forward.patch", code=2)
    assert "series apply 0.9.0 --before change-forward.patch" in result.err
