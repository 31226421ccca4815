# SPDX-License-Identifier: Apache-2.0
"""Files of bench/results: rows of one feature on one line and card (schema 1, kind ratio)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any] | None:
    """Return what a file holds, None if there is none.

    A file that cannot be read is set aside as ``<name>.broken`` with a note, so that a long measurement
    does not end in an error when its rows are to be added.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if all("case" in row for row in data["rows"]):
            return data
        why = "a row has no case"
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    aside, number = path.with_name(f"{path.name}.broken"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.broken{number}")
    path.replace(aside)
    print(f"note: {path} cannot be read ({why}); it is kept as {aside.name}", file=sys.stderr)
    return None


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a file as a whole: one that is interrupted leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def add(
    path: Path, feature: str, line: str, rows: list[dict[str, Any]], *, replace: bool, card: str = "h200"
) -> None:
    """Add rows to a file, which is made if there is none.

    Args:
        path: of the file; its folder is made too.
        feature: what a new file says; an old one keeps what it has.
        line: likewise.
        rows: with the keys ``case`` and, to replace, ``metric``.
        replace: drop the older rows of the same case and metric.
        card: as ``feature``.
    """
    data = read(path) or {
        "schema": 1,
        "kind": "ratio",
        "feature": feature,
        "line": line,
        "card": card,
        "rows": [],
        "notes": "",
    }
    kept = data["rows"]
    if replace:
        new = {(row["case"], row["metric"]) for row in rows}
        kept = [row for row in kept if (row["case"], row.get("metric")) not in new]
    write(path, data | {"rows": kept + rows})
