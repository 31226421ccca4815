"""The table of all patches in docs/patches.md, made from their trailers."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_series import pins, series
from vllm_series.errors import CheckFailed
from vllm_series.files import write_atomic
from vllm_series.series import Patch
from vllm_series.workspace import Workspace

BEGIN = "<!-- made by `series ci patch-table --write`; do not edit -->"
END = "<!-- end of the table -->"


def table(ws: Workspace) -> str:
    """Return the table: one row a patch name, with the lines that carry it, in the order of the series."""
    carried: dict[str, dict[str, Patch]] = {}
    for line in pins.lines(ws):
        for patch in series.load(ws, line):
            carried.setdefault(patch.name, {})[line] = patch
    rows = ["| patch | lines | feature | what it does | upstream files | upstream status | dropped |"]
    rows.append("|---|---|---|---|---|---|---|")
    for name, by_line in carried.items():
        first = next(iter(by_line.values()))
        files = sorted({path for patch in by_line.values() for path in patch.paths})
        cells = [
            f"`{name}`",
            ", ".join(by_line),
            _one(first, "Feature"),
            first.subject,
            "<br>".join(f"`{path.removeprefix('vllm/')}`" for path in files),
            _status(first),
            _one(first, "Drop-When"),
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _one(patch: Patch, key: str) -> str:
    return "; ".join(patch.get(key))


def _status(patch: Patch) -> str:
    """Upstream-Status, with the pull request that the patch comes from."""
    links = []
    for origin in patch.get("Origin"):
        number = re.search(r"/pull/(\d+)", origin)
        links.append(f"[PR {number[1]}]({origin.split()[0]})" if number else "")
    return ", ".join([_one(patch, "Upstream-Status"), *filter(None, links)])


def update(path: Path, text: str, *, write: bool) -> bool:
    """Put the table between the marks of a page; returns whether the page was up to date.

    Raises:
        CheckFailed: the page has no marks.
    """
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise CheckFailed(f"{path.name} has no place for the table", fix=f"add the lines {BEGIN} and {END}")
    wanted = f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
    if write:
        return not write_atomic(path, wanted)
    return page == wanted
