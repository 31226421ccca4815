"""Import of an sdist: deterministic, checked, safe, repeatable after a kill."""

from __future__ import annotations

import os
import shutil
import signal
import tarfile
from collections.abc import Callable

import pytest
from core_lab import COMMIT, FILES, Project, die_in_child, make_sdist

from vllm_series import importer, scratch, sdist
from vllm_series.errors import FetchFailed, IntegrityError


def test_import_drops_generated_files_and_keeps_modes(project: Project) -> None:
    store = importer.odb(project.ws)
    base = importer.import_pin(project.ws, project.pin())
    found = store.files(base)
    assert set(found) == {name for name in FILES if not sdist.is_generated(name)} | {"setup.sh"}
    assert found["setup.sh"][0] == "100755"
    assert found["vllm/envs.py"][0] == "100644"
    assert store.blob(base, "vllm/crlf.txt") == b"one\r\ntwo\r\n"
    assert store.blob(base, "vllm/configs/E=1,N=2.json") == b"{}\n"


def test_same_commit_on_each_import(project: Project) -> None:
    first = importer.import_pin(project.ws, project.pin())
    assert first == importer.expected_commit(project.pin())
    shutil.rmtree(project.ws.work)
    assert importer.import_pin(project.ws, project.pin()) == first


def test_second_import_does_not_read_the_sdist(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    importer.import_pin(project.ws, project.pin())
    monkeypatch.setattr(sdist, "members", None)
    importer.import_pin(project.ws, project.pin())


def test_commit_id_must_match(bare: Project) -> None:
    bare.write_pin(bare.files / "vllm-0.9.0.tar.gz", commit="fffffff")
    bare.fetch()
    assert f"was made from commit {COMMIT}, the pin says fffffff" in bare.series("apply", "0.9.0", code=4).err


def test_a_longer_pinned_commit_matches_by_prefix(bare: Project) -> None:
    bare.write_pin(bare.files / "vllm-0.9.0.tar.gz", commit=COMMIT + "0" * 31)
    bare.fetch()
    bare.series("lock")


def test_tree_id_must_match(bare: Project) -> None:
    bare.write_pin(bare.files / "vllm-0.9.0.tar.gz", tree="0" * 40)
    bare.fetch()
    assert "imports as tree" in bare.series("apply", "0.9.0", code=4).err
    assert bare.state() == "ABSENT"


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "bad",
    [
        _member("vllm-0.9.0/../evil"),
        _member("/etc/evil"),
        _member("other/evil"),
        _member("vllm-0.9.0/.git/config"),
        _member("vllm-0.9.0/vllm/envs.py"),
        _member("vllm-0.9.0/link", tarfile.SYMTYPE, "/etc/passwd"),
        _member("vllm-0.9.0/link", tarfile.SYMTYPE, "../../x"),
        _member("vllm-0.9.0/hard", tarfile.LNKTYPE, "vllm-0.9.0/README.md"),
        _member("vllm-0.9.0/fifo", tarfile.FIFOTYPE),
    ],
    ids=lambda info: f"{info.name}:{info.type.decode()}",
)
def test_unsafe_members_are_refused(bare: Project, bad: tarfile.TarInfo) -> None:
    bare.write_pin(make_sdist(bare.files, extra=[bad]))
    bare.fetch()
    assert "unsafe member" in bare.series("apply", "0.9.0", code=4).err


def test_inner_link_is_imported_as_link(bare: Project) -> None:
    bare.write_pin(
        make_sdist(bare.files, extra=[_member("vllm-0.9.0/vllm/link", tarfile.SYMTYPE, "../README.md")])
    )
    bare.fetch()
    base = importer.import_pin(bare.ws, bare.pin())
    store = importer.odb(bare.ws)
    assert store.files(base)["vllm/link"][0] == "120000"
    assert store.blob(base, "vllm/link") == b"../README.md"


@pytest.mark.parametrize("keep", [0.5, 0.98])
def test_archive_cut_short(bare: Project, keep: float) -> None:
    path = bare.files / "vllm-0.9.0.tar.gz"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    bare.write_pin(path)
    bare.fetch()
    assert "not a readable source archive" in bare.series("apply", "0.9.0", code=4).err


def test_sdist_without_commit(bare: Project) -> None:
    bare.write_pin(make_sdist(bare.files, files={**FILES, "vllm/_version.py": "x = 1\n"}))
    bare.fetch()
    with pytest.raises(IntegrityError, match="names no commit"):
        importer.import_pin(bare.ws, bare.pin())


@pytest.mark.parametrize("at", [1, 5, 12])
def test_killed_import_is_harmless(bare: Project, at: int) -> None:
    bare.fetch()

    def work(die: Callable[[], None]) -> None:
        original, count = importer._quoted, 0

        def counting(path: str) -> str:
            nonlocal count
            count += 1
            if count == at:
                die()
            return original(path)

        importer._quoted = counting
        importer.import_pin(bare.ws, bare.pin())

    status = die_in_child(work)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert importer.odb(bare.ws).commit_of(importer.base_ref("0.9.0")) is None
    base = importer.import_pin(bare.ws, bare.pin())
    store = importer.odb(bare.ws)
    assert len(store.files(base)) == len([n for n in FILES if not sdist.is_generated(n)]) + 1
    assert store.ok("fsck", "--strict", "--no-dangling")
    assert not list((bare.ws.odb / "objects/pack").glob("tmp_*"))


def test_full_disk_while_importing(bare: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    bare.fetch()
    original = importer._send

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importer, "_send", full)
    with pytest.raises(FetchFailed, match="no space left"):
        importer.import_pin(bare.ws, bare.pin())
    monkeypatch.setattr(importer, "_send", original)
    importer.import_pin(bare.ws, bare.pin())


def test_two_imports_at_once_give_one_commit(bare: Project) -> None:
    bare.fetch()
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                importer.import_pin(bare.ws, bare.pin())
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
    assert importer.odb(bare.ws).ok("fsck", "--strict", "--no-dangling")


def test_sparse_scratch_writes_only_what_is_named(project: Project) -> None:
    store = importer.odb(project.ws)
    base = importer.import_pin(project.ws, project.pin())
    with scratch.work_tree(store, project.ws, base, "t", ["vllm/configs/E=1,N=2.json", "setup.sh"]) as tree:
        files = {p.relative_to(tree.cwd).as_posix() for p in tree.cwd.rglob("*") if p.is_file()}
        there = {path for path in files if not path.startswith(".git/")}
        made = tree.out("commit-tree", "HEAD^{tree}", "-p", "HEAD", "-m", "made in the scratch tree")
        place = tree.cwd
    assert there == {"vllm/configs/E=1,N=2.json", "setup.sh"}
    assert not place.exists()
    assert store.commit_of(made) == made, "what is committed in a scratch tree is in the store"
    assert len(store.lines("worktree", "list")) == 1
