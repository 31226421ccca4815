"""Apply and the states of a tree."""

from __future__ import annotations

import re
import shutil

import pytest
from core_lab import FILES, MESSAGE, TRAILERS, Project, make_sdist

from vllm_series import importer
from vllm_series.git import Git


def test_tree_is_base_then_patches_then_overlay(patched: Project) -> None:
    assert patched.state() == "APPLIED"
    log = patched.git("log", "--reverse", "--format=%s").splitlines()
    assert log == ["vLLM 0.9.0", "Change forward", "overlay"]
    assert "y = x + 2" in (patched.tree / "vllm/envs.py").read_text()
    assert (patched.tree / "vllm/dsa/__init__.py").read_text() == "NAME = 'dsa'\n"
    assert (patched.tree / "vllm/crlf.txt").read_bytes() == b"one\r\ntwo\r\n"
    assert patched.git("status", "--porcelain") == ""


def test_second_apply_is_a_no_op_that_says_so(patched: Project) -> None:
    head = patched.git("rev-parse", "HEAD")
    file = patched.tree / "vllm/envs.py"
    before = file.stat().st_mtime_ns
    result = patched.series("apply", "0.9.0")
    assert "already applied, nothing to do" in result.out
    assert patched.series("apply", "0.9.0", "--json").json["changed"] is False
    assert patched.git("rev-parse", "HEAD") == head
    assert file.stat().st_mtime_ns == before


def test_same_commits_in_another_checkout(patched: Project) -> None:
    head = patched.git("rev-parse", "HEAD")
    shutil.rmtree(patched.root / "build")
    shutil.rmtree(patched.root / ".work")
    patched.apply()
    assert patched.git("rev-parse", "HEAD") == head


def test_the_tree_does_not_need_the_object_store(patched: Project) -> None:
    shutil.rmtree(patched.root / ".work")
    assert patched.git("fsck", "--strict", "--no-dangling") == ""
    assert patched.state() == "APPLIED"


def test_dirty_tree_is_refused_and_untouched(patched: Project) -> None:
    for name, text in (("vllm/envs.py", "mine\n"), ("new.txt", "new\n")):
        (patched.tree / name).write_text(text)
    assert patched.state() == "DIRTY"
    result = patched.series("apply", "0.9.0", code=5)
    assert "2 uncommitted changes" in result.err
    assert "--discard" in result.err
    assert (patched.tree / "vllm/envs.py").read_text() == "mine\n"
    assert patched.series("export", "0.9.0", code=5)


def test_unexported_commit_is_refused(patched: Project) -> None:
    patched.edit("vllm/envs.py", "x - 1", "x - 2")
    mine = patched.commit("More work")
    (patched.root / "overlay/vllm/dsa/b.py").write_text("b = 1\n")
    assert patched.state() == "AHEAD"
    result = patched.series("apply", "0.9.0", code=5)
    assert "More work" in result.err
    assert "series export 0.9.0" in result.err
    assert patched.git("rev-parse", "HEAD") == mine


def test_rewritten_history_is_unexported_work(patched: Project) -> None:
    patched.git("commit", "--amend", "-q", "-m", "overlay, reworded")
    assert patched.state() == "AHEAD"


def test_discard_keeps_the_work_under_a_ref(patched: Project) -> None:
    patched.edit("vllm/envs.py", "x - 1", "x - 2")
    mine = patched.commit("More work")
    (patched.tree / "vllm/envs.py").write_text("uncommitted\n")
    (patched.tree / "new.txt").write_text("new\n")
    saved = patched.series("apply", "0.9.0", "--discard", "--json").json["saved"]
    assert patched.state() == "APPLIED"
    assert not (patched.tree / "new.txt").exists()
    assert patched.git("show", f"{saved}:vllm/envs.py") == "uncommitted"
    assert patched.git("show", f"{saved}:new.txt") == "new"
    assert patched.git("rev-parse", f"{saved}^") == mine


def test_stale_overlay_patch_and_pin_are_brought_up_to_date(patched: Project) -> None:
    (patched.root / "overlay/vllm/dsa/b.py").write_text("b = 1\n")
    (patched.root / "overlay/vllm/dsa/__init__.py").unlink()
    assert patched.state() == "STALE"
    assert patched.series("export", "0.9.0", code=5).err.count("STALE") == 1
    patched.apply()
    assert patched.state() == "APPLIED"
    assert not (patched.tree / "vllm/dsa/__init__.py").exists()
    patch = patched.patches / "change-forward.patch"
    patch.write_bytes(patch.read_bytes().replace(b"y = x + 2", b"y = x + 3"))
    assert patched.state() == "STALE"
    assert "LOCK does not match" in patched.series("apply", "0.9.0", code=1).err
    patched.series("lock")
    patched.apply()
    assert "y = x + 3" in (patched.tree / "vllm/envs.py").read_text()


def test_build_outputs_that_git_ignores_survive(patched: Project) -> None:
    (patched.tree / "vllm/_C.so").write_text("binary")
    (patched.root / "overlay/vllm/dsa/b.py").write_text("b = 1\n")
    patched.apply()
    assert (patched.tree / "vllm/_C.so").read_text() == "binary"


def test_untracked_file_in_the_way_is_not_overwritten(patched: Project) -> None:
    (patched.tree / "vllm/dsa/late.py").write_text("mine\n")
    (patched.root / "overlay/vllm/dsa/late.py").write_text("theirs\n")
    patched.series("apply", "0.9.0", code=5)
    assert (patched.tree / "vllm/dsa/late.py").read_text() == "mine\n"


def test_ignored_file_in_the_way_is_not_lost(patched: Project) -> None:
    """A file that git ignores is not seen as work, but an overlay file must not silently replace it."""
    target = patched.tree / "vllm/dsa/ignored/late.py"
    target.parent.mkdir(parents=True)
    target.write_text("mine\n")
    file = patched.root / "overlay/vllm/dsa/ignored/late.py"
    file.parent.mkdir(parents=True)
    file.write_text("theirs\n")
    patched.series("apply", "0.9.0", code=5)
    assert target.read_text() == "mine\n"
    assert patched.state() == "STALE"


def test_patch_that_does_not_apply_leaves_the_tree_as_it_was(patched: Project) -> None:
    head = patched.git("rev-parse", "HEAD")
    patch = patched.patches / "change-forward.patch"
    patch.write_bytes(patch.read_bytes().replace(b" def forward", b" def forwards"))
    result = patched.series("apply", "0.9.0", code=1)
    assert "change-forward.patch (patch 1 of 1) does not apply" in result.err
    assert "series apply 0.9.0 --before change-forward.patch" in result.err
    assert patched.git("rev-parse", "HEAD") == head
    patched.git("status")
    assert not list((patched.root / ".work/scratch").glob("*"))


def test_no_fuzz(patched: Project) -> None:
    """`patch -p1` would apply this with fuzz; strict git am must not."""
    patch = patched.patches / "change-forward.patch"
    data = patch.read_bytes()
    assert b"     size = 1\n" in data or b" \n" in data
    patch.write_bytes(data.replace(b"         return y\n", b"         return z\n", 1))
    assert "does not apply" in patched.series("apply", "0.9.0", code=1).err


def test_no_three_way_merge(two: Project) -> None:
    """A 3-way merge has the blobs that it needs and would succeed; strict git am must refuse."""
    envs = FILES["vllm/envs.py"].replace("size = 1", "size = 9")
    two.write_pin(make_sdist(two.files, files={**FILES, "vllm/envs.py": envs}))
    two.fetch()
    two.lock_import()
    assert "change-forward.patch (patch 1 of 2) does not apply" in two.series("apply", "0.9.0", code=1).err


def test_before_stops_at_a_patch_and_is_partial(patched: Project) -> None:
    patched.series("apply", "0.9.0", "--before", "nope.patch", code=2)
    patched.series("apply", "0.9.0", "--before", "change-forward.patch")
    assert patched.git("log", "--format=%s") == "vLLM 0.9.0"
    assert not (patched.tree / "vllm/dsa/__init__.py").exists()
    assert patched.state() == "PRISTINE"
    patched.series("export", "0.9.0", code=5)
    patched.apply()
    assert patched.state() == "APPLIED"


def test_moving_back_in_history_is_partial_and_mended_by_apply(patched: Project) -> None:
    patched.git("reset", "-q", "--hard", "HEAD~1")
    assert patched.state() == "PARTIAL"
    patched.series("export", "0.9.0", code=5)
    patched.apply()
    assert patched.state() == "APPLIED"


def test_git_operation_in_progress_is_partial(patched: Project) -> None:
    patched.edit("vllm/envs.py", "x - 1", "x - 2")
    patched.commit("one")
    patched.git("checkout", "-q", "-b", "other", "HEAD~1")
    patched.edit("vllm/envs.py", "x - 1", "x - 3")
    patched.commit("two")
    with pytest.raises(AssertionError):
        patched.git("merge", "series/0.9.0")
    assert patched.state() == "PARTIAL"
    assert "a git merge is in progress" in patched.series("apply", "0.9.0", code=5).err
    patched.series("apply", "0.9.0", "--discard")
    assert patched.state() == "APPLIED"
    assert patched.git("status", "--porcelain") == ""


def test_foreign_folders_are_never_touched(patched: Project) -> None:
    shutil.rmtree(patched.tree)
    patched.tree.mkdir()
    (patched.tree / "precious").write_text("x")
    assert patched.state() == "FOREIGN"
    assert "mv " in patched.series("apply", "0.9.0", code=5).err
    assert patched.series("apply", "0.9.0", "--discard", code=5)
    Git(patched.tree).run("init", "-q", ".")
    Git(patched.tree).run("add", "-A")
    Git(patched.tree).run("commit", "-q", "-m", "other")
    assert patched.state() == "FOREIGN"
    patched.series("apply", "0.9.0", code=5)
    assert (patched.tree / "precious").read_text() == "x"


def test_empty_folder_counts_as_absent(project: Project) -> None:
    project.tree.mkdir(parents=True)
    assert project.state() == "ABSENT"
    project.apply()
    assert project.state() == "APPLIED"


def test_changed_result_is_an_integrity_error(patched: Project) -> None:
    lock = patched.patches / "LOCK"
    text = lock.read_text()
    lock.write_text(re.sub(r'\ntree = "[0-9a-f]{40}"', '\ntree = "' + "0" * 40 + '"', text))
    assert "LOCK says" in patched.series("apply", "0.9.0", code=4).err
    lock.write_text(re.sub(r'\nbase = "[0-9a-f]{40}"', '\nbase = "' + "0" * 40 + '"', text))
    assert "is for base tree" in patched.series("apply", "0.9.0", code=4).err
    lock.write_text("<<<<<<< HEAD\n")
    assert "an unfinished merge?" in patched.series("apply", "0.9.0", code=1).err
    lock.unlink()
    assert "series lock 0.9.0" in patched.series("apply", "0.9.0", code=1).err
    patched.series("lock")
    assert lock.read_text() == text


def test_new_pin_of_the_line_moves_the_tree(patched: Project) -> None:
    text = FILES["README.md"] + "more\n"
    patched.write_pin(make_sdist(patched.files, files={**FILES, "README.md": text}))
    patched.fetch()
    patched.lock_import()
    assert patched.state() == "STALE"
    patched.series("lock")
    patched.apply()
    assert patched.state() == "APPLIED"
    assert (patched.tree / "README.md").read_text() == text


def test_crlf_context_is_patched_byte_for_byte(project: Project) -> None:
    project.apply()
    (project.tree / "vllm/crlf.txt").write_bytes(b"one\r\nand a half\r\ntwo\r\n")
    trailers = TRAILERS.replace("envs.py::Config.forward", "crlf.txt::")
    project.commit(f"Change a file with CR\n\nWhy.\n\n{trailers}")
    project.series("export", "0.9.0")
    shutil.rmtree(project.tree)
    project.apply()
    assert (project.tree / "vllm/crlf.txt").read_bytes() == b"one\r\nand a half\r\ntwo\r\n"


def test_brackets_in_the_subject_survive(project: Project) -> None:
    project.apply()
    project.edit("vllm/envs.py", "x + 1", "x + 2")
    project.commit(MESSAGE.replace("Change forward", "[dsa] Change forward"))
    project.series("export", "0.9.0")
    assert project.git("log", "-1", "--format=%s", "HEAD~1") == "[dsa] Change forward"
    assert project.state() == "APPLIED"


def test_status_json_of_all_lines(patched: Project) -> None:
    row = patched.series("status", "--json").json["lines"]["0.9.0"]
    assert row["state"] == "APPLIED"
    assert row["cached"] == {"vllm-0.9.0.tar.gz": True}
    assert row["head"] == patched.git("rev-parse", "HEAD")


def test_import_is_a_root_commit_named_after_the_release(project: Project) -> None:
    project.apply()
    base = importer.expected_commit(project.pin())
    assert project.git("rev-list", "--max-parents=0", "HEAD") == base


def test_objects_that_another_run_is_writing_do_not_matter(two: Project) -> None:
    """A new tree is made while another line's run writes to the store: what it sees there is gone at once."""
    want = two.head_tree()
    shutil.rmtree(two.tree)
    for folder in (two.ws.odb / "objects/77", two.ws.odb / "objects/pack"):
        folder.mkdir(exist_ok=True)
        (folder / "tmp_obj_gone").symlink_to("renamed-meanwhile")
    two.apply()
    assert two.state() == "APPLIED"
    assert two.head_tree() == want
    assert two.git("fsck", "--strict", "--no-dangling") == ""
    assert two.git("remote") == ""
    assert two.git("rev-parse", "--abbrev-ref", "HEAD") == f"series/{two.line}"
