"""Errors that a user can act on. Each class is one exit code; `fix` is the command or step that mends it."""

from __future__ import annotations


class SeriesError(Exception):
    """Base of all expected failures. ``exit_code`` is what the command line returns."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class CheckFailed(SeriesError):
    """A check did not hold (lint, anchor, lock, wheel content)."""

    exit_code = 1


class UsageError(SeriesError):
    """The call itself is wrong: unknown line, bad version, contradictory options."""

    exit_code = 2


class NeedsPerson(SeriesError):
    """A person has to decide; the state is saved and the next command is named in ``fix``."""

    exit_code = 3


class IntegrityError(SeriesError):
    """Bytes are not the pinned ones: sha256, commit id, tree id."""

    exit_code = 4


class WouldLoseWork(SeriesError):
    """Going on would overwrite uncommitted or unexported work."""

    exit_code = 5


class FetchFailed(SeriesError):
    """The network, the index or the disk did not deliver a file that is needed."""

    exit_code = 6


class TestRegression(SeriesError):
    """Upstream's tests say something else on the patched tree than on the pristine one."""

    exit_code = 7
    __test__ = False
