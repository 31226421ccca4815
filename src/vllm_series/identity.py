"""Tells an applied tree which build it is: the record that ``vllm.dsa.info()`` reads, as a file git ignores.

The overlay is the same for all lines, so it cannot know its line by itself. A wheel carries the full record
(see ``wheel/provenance.py``) under the same name.
"""

from __future__ import annotations

import json
from pathlib import Path

from vllm_series.pins import Pin

#: Read by overlay/vllm/dsa/provenance.py.
RECORD = "vllm/dsa/_provenance.json"


def record(pin: Pin) -> str:
    """Return the text of the record for a tree of this pin."""
    data = {
        "kind": "source tree",
        "line": pin.line,
        "version": pin.wheel_version,
        "series_version": str(pin.dsa),
        "upstream_commit": pin.source.commit,
    }
    return json.dumps(data, indent=2) + "\n"


def write(tree: Path, pin: Pin) -> None:
    """Put the record into an applied tree and make git ignore it there; a second call changes nothing."""
    target = tree / RECORD
    if not target.parent.is_dir():  # a tree without the overlay
        return
    if (tree / ".git").is_dir():
        _ignore(tree / ".git" / "info" / "exclude")
    text = record(pin)
    if not target.is_file() or target.read_text(encoding="utf-8") != text:
        target.write_text(text, encoding="utf-8")


def _ignore(exclude: Path) -> None:
    rows = exclude.read_text(encoding="utf-8") if exclude.is_file() else ""
    if f"/{RECORD}" not in rows.splitlines():
        exclude.parent.mkdir(exist_ok=True)
        newline = "" if not rows or rows.endswith("\n") else "\n"
        exclude.write_text(f"{rows}{newline}/{RECORD}\n", encoding="utf-8")
