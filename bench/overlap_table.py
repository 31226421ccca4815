# SPDX-License-Identifier: Apache-2.0
"""Turns the rows of bench/e2e_decode.py into what ``VLLM_INDEXER_OVERLAP=auto`` knows.

    python bench/overlap_table.py            # show what it would write, and why
    python bench/overlap_table.py --write    # overlay/vllm/dsa/overlap/measured.py
    python bench/overlap_table.py --check    # exit code 1 if that file says something else

A mode is chosen for a token count if at no measured context it was slower than off by more than the noise,
and in the median of the contexts faster by more than it. The noise is what off's engine starts differ by at
that token count, at least 0.5 %. Without that control at enough contexts nothing is chosen. All of it on the
GPU time of the decode graph.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "overlap"
TABLE = ROOT / "overlay" / "vllm" / "dsa" / "overlap" / "measured.py"
LEAST_NOISE = 0.005
#: A token count measured at fewer contexts, off against itself included, decides nothing.
LEAST_CONTEXTS = 3
CASE = re.compile(
    r"mode=(?P<mode>[\w.]+) phase=decode heads=(?P<heads>\d+) index=(?P<index>\d+) graph=(?P<graph>\w+)"
    r" B=(?P<batch>\d+) ctx=(?P<context>\d+)(?: quant=(?P<weights>\w+))?"
)

DOCSTRING = (
    '"""What ``auto`` knows. Written by ``bench/overlap_table.py --write`` from bench/results; '
    'do not edit."""'
)
#: The fields of `vllm.dsa.overlap.auto.Entry` without its points.
Key = tuple[str, str, int, int, str, str]


@dataclass
class Point:
    """Ratios of one token count, by mode and context."""

    ratios: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))

    def noise(self) -> float:
        return max([LEAST_NOISE, *(abs(ratio - 1) for ratio in self.ratios["off"].values())])

    def choice(self) -> str:
        """The best mode, off if none is clearly better."""
        best, gain = "off", self.noise()
        for mode in ("wk", "full"):
            ratios = list(self.ratios[mode].values())
            controlled = self.ratios[mode].keys() & self.ratios["off"].keys()
            if len(controlled) < LEAST_CONTEXTS or min(ratios) < 1 - self.noise():
                continue
            if statistics.median(ratios) - 1 > gain:
                best, gain = mode, statistics.median(ratios) - 1
        return best


def read(folder: Path) -> dict[Key, dict[int, Point]]:
    """Return the points of every configuration. The newest row of a case counts (files are appended to)."""
    files = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return collect([(data["line"], data["card"], data["rows"]) for data in files])


def collect(measured: list[tuple[str, str, list[dict[str, Any]]]]) -> dict[Key, dict[int, Point]]:
    """The same of rows, with their line and card."""
    found: dict[Key, dict[int, Point]] = defaultdict(lambda: defaultdict(Point))
    for line, card, rows in measured:
        for row in rows:
            match = CASE.fullmatch(row["case"])
            if match is None or row["metric"] != "graph" or row["ratio"] is None:
                continue
            # The decode graphs of all modes of vLLM that have full ones are the same: what `auto` asks for.
            graph = "FULL" if match["graph"].startswith("FULL") else match["graph"]
            key = (line, card, int(match["heads"]), int(match["index"]), graph, match["weights"] or "")
            point = found[key][int(match["batch"])]
            point.ratios[match["mode"]][int(match["context"])] = row["ratio"]
    return found


def entries(found: dict[Key, dict[int, Point]]) -> list[tuple[Key, list[tuple[int, str]]]]:
    """Configurations for which something is better than off, with the choice at each token count."""
    made = []
    for key, points in sorted(found.items()):
        chosen = [(batch, point.choice()) for batch, point in sorted(points.items())]
        if any(mode != "off" for _, mode in chosen):
            made.append((key, chosen))
    return made


def text(made: list[tuple[Key, list[tuple[int, str]]]]) -> str:
    """The module that holds the entries."""
    head = [
        "# SPDX-License-Identifier: Apache-2.0",
        DOCSTRING,
        "",
        "from __future__ import annotations",
        "",
        "from vllm.dsa.overlap.auto import Entry",
        "",
    ]
    if not made:
        head += [
            "#: Nothing is measured yet, so ``auto`` acts as ``off`` on every card.",
            "MEASURED: tuple[Entry, ...] = ()",
        ]
        return "\n".join(head) + "\n"
    head += [
        "#: GPU time of decode graphs, compared with off at several contexts.",
        "MEASURED: tuple[Entry, ...] = (",
    ]
    for (line, card, heads, index_heads, graph, weights), points in made:
        head += ["    Entry(", f'        "{line}",', f'        "{card}",', f"        {heads},"]
        head += [f"        {index_heads},", f'        "{graph}",', "        ("]
        head += [f'            ({batch}, "{mode}"),' for batch, mode in points]
        head += ["        ),", *([f'        "{weights}",'] if weights else []), "    ),"]
    return "\n".join([*head, ")"]) + "\n"


def reasons(found: dict[Key, dict[int, Point]]) -> str:
    """What was compared for every choice, for a person to read."""
    lines: list[str] = []
    for key, points in sorted(found.items()):
        lines.append("line {} card {} heads {} index {} graph {} {}".format(*key).rstrip())
        for batch, point in sorted(points.items()):
            shown: dict[str, Any] = {
                mode: [round(ratio, 3) for _, ratio in sorted(point.ratios[mode].items())]
                for mode in sorted(set(point.ratios) - {"off"})
            }
            control = (
                "" if len(point.ratios["off"]) >= LEAST_CONTEXTS else "  off was not compared with itself"
            )
            lines.append(f"  B={batch}: {point.choice()}  noise {point.noise():.3f}  {shown}{control}")
        gap = auto_gap(points)
        if gap is not None:
            lines.append(
                f"  auto took at most {1 / gap[0]:.3f} times the best fixed mode; noise {gap[1]:.3f}"
            )
    return "\n".join(lines) or "nothing is measured"


def auto_gap(points: dict[int, Point]) -> tuple[float, float] | None:
    """How far ``auto`` stays behind the best fixed mode of a configuration.

    Returns:
        The least over all points of what the best of off, wk and full took divided by what auto took (1.0: as
        fast), and the most that off's own passes differ by, as a share; None where auto was not measured.
    """
    gaps = []
    for point in points.values():
        for context, ratio in point.ratios["auto"].items():
            fixed = [point.ratios[mode].get(context, 0.0) for mode in ("wk", "full")]
            gaps.append(ratio / max(1.0, *fixed))
    return (min(gaps), max(point.noise() for point in points.values())) if gaps else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    found = read(args.results)
    wanted = text(entries(found))
    print(reasons(found))
    if args.write:
        args.table.write_text(wanted)
    elif args.check and args.table.read_text() != wanted:
        print(f"error: {args.table} is not what {args.results} gives", file=sys.stderr)
        print("  fix: python bench/overlap_table.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
