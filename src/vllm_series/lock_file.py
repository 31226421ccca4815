"""File locks that end with the process and are shared with the git children that it started.

A killed tool can leave a git child running for a moment; because the child inherits the lock, the next run
waits
for it instead of working beside it.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_series.errors import NeedsPerson


class _Held(threading.local):
    """Descriptors of the locks that this thread holds. A child of another thread must not be handed them:
    they may be closed before it starts."""

    def __init__(self) -> None:
        self.descriptors: set[int] = set()


_held = _Held()
WAIT_SECONDS = 600.0


def held() -> tuple[int, ...]:
    """Return the descriptors of the locks that this thread holds, to be passed on to its children."""
    return tuple(_held.descriptors)


@contextmanager
def locked(path: Path, *, wait: float | None = None) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (created if missing); not reentrant.

    Raises:
        NeedsPerson: another process held it for longer than ``wait`` seconds.
    """
    wait = WAIT_SECONDS if wait is None else wait
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(fd, path, wait)
        _held.descriptors.add(fd)
        yield
    finally:
        _held.descriptors.discard(fd)
        os.close(fd)


def _take(fd: int, path: Path, wait: float) -> None:
    end = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise NeedsPerson(
                    f"another run of this tool holds {path.name} for more than {wait:.0f} s",
                    fix="wait for it to end, or end it, and run the command again",
                ) from None
            time.sleep(0.1)
