"""``quarantine.toml``: single tests that are known to be unsteady, with a measured rate and an expiry
date."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_series.errors import CheckFailed

FIX = "correct quarantine.toml (docs/upstream-tests.md says what an entry holds)"


@dataclass(frozen=True)
class Entry:
    """One quarantined node of one line."""

    node: str
    line: str
    rate: float  # measured share of failing runs of the unpatched tree, 0 < rate < 1
    runs: int
    reason: str
    expires: datetime.date


def load(path: Path, lines: Iterable[str]) -> list[Entry]:
    """Read and check the file; no file means no entries.

    Raises:
        CheckFailed: an entry is not complete, uses a wildcard, is there twice, or names an unknown line.
    """
    if not path.is_file():
        return []
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CheckFailed(f"{path.name} is not valid TOML: {error}", fix=FIX) from error
    known = set(lines)
    found: list[Entry] = []
    for number, row in enumerate(data.get("test", []), 1):
        try:
            entry = Entry(
                row["node"],
                row["line"],
                float(row["rate"]),
                int(row["runs"]),
                row["reason"].strip(),
                row["expires"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckFailed(f"{path.name}: entry {number} lacks or misspells {error}", fix=FIX) from error
        wrong = _wrong(entry, known)
        if wrong:
            raise CheckFailed(f"{path.name}: entry {number} ({entry.node}): {wrong}", fix=FIX)
        if any((one.node, one.line) == (entry.node, entry.line) for one in found):
            raise CheckFailed(f"{path.name}: {entry.node} is there twice for {entry.line}", fix=FIX)
        found.append(entry)
    return found


def _wrong(entry: Entry, lines: set[str]) -> str:
    if "::" not in entry.node or entry.node.rpartition("::")[2].partition("[")[0].count("*"):
        return "name one test by its full node id, no wildcard"
    if entry.line not in lines:
        return f"line {entry.line} is not carried"
    if not 0 < entry.rate < 1:
        return "rate must be a measured share between 0 and 1: a test that always fails is not unsteady"
    if entry.runs < 3:
        return "a rate needs at least 3 runs"
    if not isinstance(entry.expires, datetime.date) or isinstance(entry.expires, datetime.datetime):
        return "expires must be a TOML date (2026-12-31)"
    return "" if entry.reason else "give a reason"


def check_expired(entries: Iterable[Entry], today: datetime.date) -> None:
    """Raise CheckFailed naming every entry whose date has passed."""
    over = [f"{one.node} ({one.line}, {one.expires})" for one in entries if one.expires < today]
    if over:
        raise CheckFailed(
            "quarantine.toml: expired: " + "; ".join(over),
            fix="mend the tests, remove the entries, or measure again and give the new rate and date",
        )
