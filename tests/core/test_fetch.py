"""Fetching: cache, resume, and every way in which it can go wrong."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from core_lab import Index, Project, die_in_child, make_sdist

from vllm_series import fetch
from vllm_series import index as indexing
from vllm_series.errors import FetchFailed, IntegrityError


def _big(bare: Project) -> Path:
    """Make the sdist large enough to be cut in the middle."""
    from core_lab import FILES

    noise = "".join(hashlib.sha256(str(n).encode()).hexdigest() for n in range(60000))
    path = make_sdist(bare.files, files={**FILES, "data.txt": noise})
    bare.write_pin(path)
    return path


def test_fetch_from_the_index_and_then_from_the_cache(bare: Project, index: Index) -> None:
    first = bare.series("fetch", "0.9.0", "--json").json["files"][0]
    assert Path(first["path"]).read_bytes() == (bare.files / first["file"]).read_bytes()
    count = len(index.requests)
    bare.series("fetch", "0.9.0")
    assert len(index.requests) == count, "the second run must not ask the index"
    assert not list(Path(first["path"]).parent.glob("*.part"))


def test_html_index(bare: Project, index: Index) -> None:
    index.html = True
    bare.series("fetch", "0.9.0")


def test_plain_progress_lines_off_a_terminal(bare: Project, index: Index) -> None:
    err = bare.series("fetch", "0.9.0").err
    assert "fetch vllm-0.9.0.tar.gz (" in err
    assert "\r" not in err
    assert "\x1b" not in err


def test_wrong_hash_announced_by_the_index(bare: Project, index: Index) -> None:
    make_sdist(bare.files, files={"vllm/_version.py": "other"})
    result = bare.series("fetch", "0.9.0", code=4)
    assert "the pin says" in result.err
    assert "fix:" in result.err
    assert all("/files/" not in path for path, _ in index.requests), "nothing is downloaded"


def test_wrong_bytes_behind_a_right_hash(bare: Project, index: Index) -> None:
    name = "vllm-0.9.0.tar.gz"
    good = (bare.files / name).read_bytes()
    index.replaced[name] = b"x" * len(good)
    assert "has sha256" in bare.series("fetch", "0.9.0", code=4).err
    index.replaced.clear()
    bare.series("fetch", "0.9.0")


def test_too_long_answer(bare: Project, index: Index) -> None:
    name = "vllm-0.9.0.tar.gz"
    index.replaced[name] = (bare.files / name).read_bytes() + b"more"
    assert "longer than the pinned" in bare.series("fetch", "0.9.0", code=4).err


def test_interrupted_download_is_resumed_at_the_byte(bare: Project, index: Index) -> None:
    path = _big(bare)
    index.cut = 1_000_000
    bare.series("fetch", "0.9.0")
    ranges = [asked for name, asked in index.requests if "/files/" in name]
    assert len(ranges) == 2
    assert ranges[0] == ""
    assert ranges[1].startswith("bytes=")
    assert int(ranges[1][6:-1]) > 0
    assert fetch.cached_path(bare.ws, bare.pin().source.sdist).read_bytes() == path.read_bytes()


def test_server_that_cannot_resume_is_read_from_the_start(bare: Project, index: Index) -> None:
    _big(bare)
    index.ranges, index.cut = False, 1_000_000
    bare.series("fetch", "0.9.0")


def test_truncated_for_good_keeps_what_came_and_says_so(bare: Project, index: Index) -> None:
    path = _big(bare)
    index.cut, index.cut_once, index.ranges = 1_000_000, False, False
    result = bare.series("fetch", "0.9.0", code=6)
    assert "of 1.9 MiB" in result.err or "MiB of" in result.err
    assert "goes on where it stopped" in result.err
    index.cut, index.ranges = None, True
    index.requests.clear()
    bare.series("fetch", "0.9.0")
    assert any(asked.startswith("bytes=") for _, asked in index.requests), "the rest alone is fetched"
    assert fetch.cached_path(bare.ws, bare.pin().source.sdist).read_bytes() == path.read_bytes()


def test_leftover_of_another_file_is_replaced(bare: Project, index: Index) -> None:
    part = fetch.cached_path(bare.ws, bare.pin().source.sdist)
    part = part.with_name(part.name + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"garbage")
    result = bare.series("fetch", "0.9.0")
    assert "does not check, starting over" in result.err


def test_no_network_without_cache(bare: Project) -> None:
    result = bare.series("fetch", "0.9.0", code=6)
    assert "cannot reach http://127.0.0.1:9/simple/vllm/" in result.err
    assert "series fetch --source DIR" in result.err
    assert bare.series("apply", "0.9.0", code=6).err.startswith("error: cannot reach")


def test_no_network_with_cache(bare: Project) -> None:
    bare.fetch()
    bare.series("fetch", "0.9.0")
    bare.series("lock")
    bare.series("apply", "0.9.0")


def test_offline_switch_never_asks(bare: Project, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERIES_OFFLINE", "1")
    assert "VLLM_SERIES_OFFLINE" in bare.series("fetch", "0.9.0", code=6).err
    assert index.requests == []


def test_damaged_cache_is_noticed_and_fetched_again(bare: Project, index: Index) -> None:
    bare.series("fetch", "0.9.0")
    path = fetch.cached_path(bare.ws, bare.pin().source.sdist)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))
    assert "damaged" in bare.series("fetch", "0.9.0").err
    assert hashlib.sha256(path.read_bytes()).hexdigest() == bare.pin().source.sdist.sha256


def test_wrong_file_handed_in(bare: Project, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "vllm-0.9.0.tar.gz").write_bytes(b"no")
    assert "is not the pinned file" in bare.series("fetch", "0.9.0", "--source", str(other), code=4).err
    assert bare.series("fetch", "0.9.0", "--source", str(other / "none"), code=2)


def test_server_errors(bare: Project, index: Index) -> None:
    index.status = 403
    assert "answered 403" in bare.series("fetch", "0.9.0", code=6).err
    index.status = 200
    (bare.files / "vllm-0.9.0.tar.gz").unlink()
    assert "has no vllm-0.9.0.tar.gz" in bare.series("fetch", "0.9.0", code=6).err


def test_index_variables_and_password_in_messages(bare: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_SERIES_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://me:secret@127.0.0.1:9/pip/")
    assert indexing.index_url() == "http://me:secret@127.0.0.1:9/pip"
    err = bare.series("fetch", "0.9.0", code=6).err
    assert "secret" not in err
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/uv")
    assert indexing.index_url() == "http://127.0.0.1:9/uv"
    monkeypatch.delenv("UV_DEFAULT_INDEX")
    monkeypatch.delenv("PIP_INDEX_URL")
    assert indexing.index_url() == "https://pypi.org/simple"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_full_disk(bare: Project, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _big(bare)
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)], capture_output=True
    ).returncode:
        pytest.skip("this container may not mount")
    try:
        monkeypatch.setenv("VLLM_SERIES_CACHE", str(small))
        result = bare.series("fetch", "0.9.0", code=6)
        assert "no space left" in result.err
        assert "VLLM_SERIES_CACHE" in result.err
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_disk_that_fills_while_writing(bare: Project, index: Index) -> None:
    """A file size limit makes the write fail half way, as a full disk does."""
    _big(bare)

    def work(_: object) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        try:
            fetch.fetch(bare.ws, bare.pin().source.sdist)
        except FetchFailed as err:
            os._exit(60 + ("no space left" in err.message))
        os._exit(0)

    status = die_in_child(work)
    assert os.waitstatus_to_exitcode(status) == 61
    bare.series("fetch", "0.9.0")


def test_killed_in_the_middle_goes_on(bare: Project, index: Index) -> None:
    path = _big(bare)
    artifact = bare.pin().source.sdist

    def work(die: Callable[[], None]) -> None:
        calls = 0
        real = fetch.progress

        @contextlib.contextmanager
        def counting(label: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
            with real(label, total, done) as advance:

                def step(n: int) -> None:
                    nonlocal calls
                    calls += 1
                    advance(n)
                    if calls == 10:
                        die()

                yield step

        fetch.progress = counting  # type: ignore[assignment]
        fetch.fetch(bare.ws, artifact)

    assert os.WTERMSIG(die_in_child(work)) == signal.SIGKILL
    final = fetch.cached_path(bare.ws, artifact)
    assert not final.exists()
    bare.series("fetch", "0.9.0")
    assert final.read_bytes() == path.read_bytes()


def test_cache_folder_that_cannot_be_made(
    bare: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("VLLM_SERIES_CACHE", str(tmp_path / "file" / "sub"))
    assert "VLLM_SERIES_CACHE" in bare.series("fetch", "0.9.0", code=6).err


def test_integrity_error_has_exit_code_4() -> None:
    assert (IntegrityError.exit_code, FetchFailed.exit_code) == (4, 6)
