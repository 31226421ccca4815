# SPDX-License-Identifier: Apache-2.0
"""The stored rows of LiteTopK's measurements, and the engine's table that follows from them. Needs no card.

    python bench/litetopk_rows.py FILE ...   # stores the rows of FILE..., newer ones in place of older ones
    python bench/litetopk_rows.py --table    # prints the table that the stored rows allow
    python bench/litetopk_rows.py --table --write   # and writes it into dispatch.py and docs/litetopk.md

A size is in the table if all stored times with at least so many keys are at least ``--margin`` times those of
upstream's default path, for 32 and for 64 heads and every distribution. Of several equal requests in one
launch, all queries and the keys of one count, as `vllm.dsa.litetopk.dispatch` asks for them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import results_file

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "bench/results/litetopk/0.33.0-h200.json"
DISPATCH = ROOT / "overlay/vllm/dsa/litetopk/dispatch.py"
PAGE = ROOT / "docs/litetopk.md"
NEVER = 1 << 21  # more keys than the kernel takes
TABLE = re.compile(r"^TABLE = \(.*\)$", re.MULTILINE)
PAGE_TABLE = re.compile(
    r"(?<=\| queries that a rank scores \| from so many keys of the request on \|\n\|---\|---\|\n)(\|.*\n)+"
)


def sizes(rows: list[dict[str, Any]]) -> list[tuple[int, int, int, float]]:
    """Heads, queries, keys of a request and ratio to the default path of each stored time, K = 2048."""
    found = []
    for row in rows:
        value = dict(part.split("=", 1) for part in row["case"].split() if "=" in part)
        if row["metric"] == "time" and value.get("budget") == "512MiB" and value["K"] == "2048":
            keys = int(value["S"]) // int(value["B"])
            found.append((int(value["H"]), int(value["Q"]), keys, float(row["ratio"])))
    return found


def fewest_keys(points: list[tuple[int, int, int, float]], queries: int, margin: float) -> int:
    """From how many keys on so many queries are never slower: a length that both numbers of heads have."""
    here = [(heads, keys, ratio) for heads, q, keys, ratio in points if q == queries]
    both = {keys for heads, keys, _ in here if heads == 32} & {keys for heads, keys, _ in here if heads == 64}
    good = [keys for keys in both if all(ratio >= margin for _, longer, ratio in here if longer >= keys)]
    return min(good, default=NEVER)


def table(points: list[tuple[int, int, int, float]], margin: float) -> list[tuple[int, int]]:
    """(most queries, fewest keys) as `vllm.dsa.litetopk.dispatch.TABLE` has them.

    Between two measured numbers of queries both must allow it. The last row begins an eighth below the
    largest measured number, because a chunk that shares its step with decodes is a little shorter.
    """
    heads_of = {q: {heads for heads, other, _, _ in points if other == q} for _, q, _, _ in points}
    measured = sorted(q for q, heads in heads_of.items() if heads >= {32, 64})
    fewest = {q: fewest_keys(points, q, margin) for q in measured}
    ranges = [(measured[0], fewest[measured[0]])]
    ranges += [(high, max(fewest[low], fewest[high])) for low, high in pairwise(measured)]
    largest = measured[-1]
    ranges[-1] = (largest // 8 * 7 - 1, ranges[-1][1])
    ranges.append((1 << 31, fewest[largest]))
    for _, queries, keys, ratio in points:  # also of numbers of queries that one number of heads lacks
        at = next(i for i, (most, _) in enumerate(ranges) if queries <= most)
        if ratio < margin and keys >= ranges[at][1]:
            ranges[at] = (ranges[at][0], 1 << keys.bit_length())
    return [row for row, after in pairwise([*ranges, (0, 0)]) if row[1] != after[1]]


def page(rows: list[tuple[int, int]]) -> str:
    """The table as the page shows it."""
    lines, first = [], 0
    for most, keys in rows:
        name = (
            f"up to {most}" if not first else f"{first} to {most}" if most < 1 << 31 else f"{first} and more"
        )
        lines.append(f"| {name} | {keys if keys < NEVER else 'never'} |\n")
        first = most + 1
    return "".join(lines)


def code(rows: list[tuple[int, int]]) -> str:
    """The table as dispatch.py has it."""
    parts = [
        (f"1 << {n.bit_length() - 1}" if n > 8192 and n & (n - 1) == 0 else str(n))
        for row in rows
        for n in row
    ]
    return "TABLE = (" + ", ".join(f"({a}, {b})" for a, b in zip(parts[::2], parts[1::2], strict=True)) + ")"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--margin", type=float, default=1.0)
    args = parser.parse_args()
    for file in args.files:
        data = json.loads(file.read_text(encoding="utf-8"))
        newest = {(row["case"], row["metric"]): row for row in data["rows"]}  # two sets can share a shape
        results_file.add(STORED, "litetopk", data["line"], list(newest.values()), replace=True)
        print(f"{len(newest)} rows of {file.name} stored")
    if not args.table:
        return
    rows = table(sizes(json.loads(STORED.read_text(encoding="utf-8"))["rows"]), args.margin)
    print(code(rows))
    print(page(rows), end="")
    if args.write:
        for path, pattern, text in ((DISPATCH, TABLE, code(rows)), (PAGE, PAGE_TABLE, page(rows))):
            old = path.read_text(encoding="utf-8")
            new, count = pattern.subn(text, old)
            if count != 1:
                raise SystemExit(f"error: {path.name} has no table to replace")
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
