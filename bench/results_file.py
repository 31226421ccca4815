# SPDX-License-Identifier: Apache-2.0
"""Files of bench/results: rows of one feature on one line and card (schema 1, kind ratio)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
    data: dict[str, Any] = {
        "schema": 1,
        "kind": "ratio",
        "feature": feature,
        "line": line,
        "card": card,
        "rows": [],
        "notes": "",
    }
    if path.is_file():
        data = json.loads(path.read_text())
    kept = data["rows"]
    if replace:
        new = {(row["case"], row["metric"]) for row in rows}
        kept = [row for row in kept if (row["case"], row["metric"]) not in new]
    data["rows"] = kept + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
