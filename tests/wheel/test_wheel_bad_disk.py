"""Full disk, kill in the middle, two runs at once: nothing half-written is left, and the next run works."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import time
from pathlib import Path

import pytest
from tiny_upstream import Upstream

from vllm_series.errors import FetchFailed
from vllm_series.files import sha256_file
from vllm_series.wheel import archive
from vllm_series.wheel import repack as module
from vllm_series.wheel.recipe import Recipe
from vllm_series.wheel.repack import repack

_FORK = multiprocessing.get_context("fork")


@pytest.fixture
def expected(upstream: Upstream, tmp_path: Path) -> str:
    return repack(upstream.recipe(), tmp_path / "expected", tmp_path / "expected-state").sha256


def run_limited(recipe: Recipe, folder: Path, limit: int, answer: multiprocessing.Queue[str]) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        repack(recipe, folder / "dist", folder / "state")
        answer.put("no error")
    except FetchFailed as error:
        answer.put(f"{error.exit_code} {error}")


@pytest.mark.parametrize("missing", [1, 500, 4000, 1 << 30])
def test_full_disk(upstream: Upstream, tmp_path: Path, expected: str, missing: int) -> None:
    """The file size limit of the process stands in for a disk that fills up at any point of the write."""
    (whole,) = (tmp_path / "expected").iterdir()
    recipe, answer = upstream.recipe(), _FORK.Queue()
    limit = max(whole.stat().st_size - missing, 0)
    child = _FORK.Process(target=run_limited, args=(recipe, tmp_path, limit, answer))
    child.start()
    text = answer.get(timeout=30)
    child.join(30)
    assert text.startswith("6 no space left in") and "fix: free some space" in text
    assert not list((tmp_path / "dist").glob("*")), "nothing may be left"
    assert repack(recipe, tmp_path / "dist", tmp_path / "state").sha256 == expected


def test_too_little_room_is_noticed_before_writing(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLACK", 1 << 60)
    with pytest.raises(FetchFailed, match="no space left"):
        repack(upstream.recipe(), tmp_path / "dist", tmp_path / "state")


def test_folder_that_cannot_be_written(upstream: Upstream, tmp_path: Path) -> None:
    (tmp_path / "dist").write_text("a file where the folder should be")
    with pytest.raises(FetchFailed, match="cannot write"):
        repack(upstream.recipe(), tmp_path / "dist" / "sub", tmp_path / "state")


def hang_while_writing(recipe: Recipe, folder: Path) -> None:
    def slow(target: Path, source: archive.Source, members: object) -> None:
        target.write_bytes(b"half a wheel")
        time.sleep(600)

    archive.write = slow  # type: ignore[assignment]
    repack(recipe, folder / "dist", folder / "state")


def test_killed_in_the_middle_then_run_again(upstream: Upstream, tmp_path: Path, expected: str) -> None:
    recipe = upstream.recipe()
    child = _FORK.Process(target=hang_while_writing, args=(recipe, tmp_path))
    child.start()
    end = time.monotonic() + 300
    while not list((tmp_path / "dist").glob(".*.part")) and time.monotonic() < end:
        time.sleep(0.02)
    child.kill()
    child.join()
    assert list((tmp_path / "dist").glob(".*.part")), "the killed run must have left its half"
    assert not list((tmp_path / "dist").glob("*.whl"))
    built = repack(recipe, tmp_path / "dist", tmp_path / "state")
    assert built.sha256 == expected and [p.name for p in (tmp_path / "dist").iterdir()] == [built.path.name]


def test_killed_after_the_rename(upstream: Upstream, tmp_path: Path, expected: str) -> None:
    """The wheel is there but its note is not: the next run writes it again rather than trusting it."""
    recipe = upstream.recipe()
    built = repack(recipe, tmp_path / "dist", tmp_path / "state")
    next((tmp_path / "state").glob("*.json")).unlink()
    again = repack(recipe, tmp_path / "dist", tmp_path / "state")
    assert not again.reused and again.sha256 == built.sha256 == expected


def put(recipe: Recipe, folder: Path, queue: multiprocessing.Queue[str]) -> None:
    queue.put(repack(recipe, folder / "dist", folder / "state").sha256)


def test_two_runs_at_once(upstream: Upstream, tmp_path: Path, expected: str) -> None:
    recipe, queue = upstream.recipe(), _FORK.Queue()
    children = [_FORK.Process(target=put, args=(recipe, tmp_path, queue)) for _ in range(3)]
    for child in children:
        child.start()
    assert {queue.get(timeout=300) for _ in children} == {expected}
    for child in children:
        child.join()
    (only,) = (tmp_path / "dist").iterdir()
    assert sha256_file(only) == expected
