# SPDX-License-Identifier: Apache-2.0
"""Makes the plots in docs/plots from the stored results alone.

    python bench/plots.py            # writes what changed
    python bench/plots.py --check    # says which plots are not of the stored results; exit code 1

Each SVG names, in its description, a digest of the rows and of the settings that it was made from, so that a
stored plot can be compared with the results whatever matplotlib draws on another machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PLOTS_DIR = "bench/results", "docs/plots"
LAYOUT = 1  # raise when the drawing itself changes


@dataclass(frozen=True)
class Plot:
    """One figure of one results file.

    Attributes:
        name: file name in docs/plots, without suffix.
        results: file under bench/results.
        title: what is shown, with the card.
        select: expression that a row's case matches as a whole; groups ``x`` (a number) and ``group``.
        label: one curve's name, a format string with ``group``.
        x_label: what the x axis is.
        metric: of the rows.
        value: ``times``: baseline and ours; ``ratio``: how many times faster ours is.
    """

    name: str
    results: str
    title: str
    select: str
    label: str
    x_label: str
    metric: str = "time"
    value: str = "times"


PLOTS = (
    Plot(
        "fused_q-kernel",
        "fused_q/0.33.0-h200.json",
        "query packing on an H200: upstream's kernel (dashed) and ours",
        r"kernel T=(?P<x>\d+) (?P<group>heads=\d+ index=\d+)",
        "{group}",
        "tokens",
    ),
    Plot(
        "litetopk-operator",
        "litetopk/0.33.0-h200.json",
        "LiteTopK on an H200 against upstream's default chunks, 8192 queries, iid scores",
        r"H=(?P<group>\d+) K=2048 Q=8192 S=(?P<x>\d+) B=1 budget=512MiB dist=iid",
        "{group} indexer heads",
        "keys",
        value="ratio",
    ),
)


def points(plot: Plot, root: Path = ROOT) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Return the rows of each curve by rising x; of several rows of a case the newest (last) counts.

    Raises:
        SystemExit: no row fits, so the plot would be empty.
    """
    rows = json.loads((root / RESULTS / plot.results).read_text(encoding="utf-8"))["rows"]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        match = re.fullmatch(plot.select, row["case"])
        if match and row["metric"] == plot.metric:
            found.setdefault(match["group"], {})[int(match["x"])] = row
    if not found:
        sys.exit(f"error: {plot.results} has no row for {plot.name}")
    return {group: sorted(one.items()) for group, one in sorted(found.items())}


def digest(plot: Plot, root: Path = ROOT) -> str:
    """Return what identifies a figure: settings and the figures that it shows."""
    shown = {
        group: [(x, row["baseline"], row["ours"], row["ratio"], row["unit"]) for x, row in one]
        for group, one in points(plot, root).items()
    }
    text = json.dumps([LAYOUT, asdict(plot), shown], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def draw(plot: Plot, target: Path, root: Path = ROOT) -> None:
    """Write the figure as SVG; the same input and matplotlib give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = {"svg.hashsalt": plot.name, "svg.fonttype": "none", "font.size": 10}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        unit = ""
        for number, (group, rows) in enumerate(points(plot, root).items()):
            xs = [x for x, _ in rows]
            unit, color = rows[0][1]["unit"], f"C{number}"
            label = plot.label.format(group=group)
            if plot.value == "ratio":
                axes.plot(xs, [row["ratio"] for _, row in rows], "o-", color=color, label=label)
            else:
                axes.plot(xs, [row["ours"] for _, row in rows], "o-", color=color, label=label)
                axes.plot(xs, [row["baseline"] for _, row in rows], "o--", color=color)
        axes.set_xscale("log", base=2)
        if plot.value == "ratio":
            axes.axhline(1.0, color="grey", linewidth=1)
            axes.set_ylabel("times faster")
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
            axes.set_ylabel(f"{plot.metric}, {unit}")
        axes.set_xlabel(plot.x_label)
        axes.set_title(plot.title, fontsize=10)
        axes.legend()
        axes.grid(visible=True, alpha=0.3)
        target.parent.mkdir(parents=True, exist_ok=True)
        about = {"Date": None, "Description": f"{plot.results} rows {digest(plot, root)}"}
        figure.savefig(target, format="svg", metadata=about)
        pyplot.close(figure)
    text = target.read_text(encoding="utf-8")
    target.write_text("\n".join(row.rstrip() for row in text.splitlines()) + "\n", encoding="utf-8")


def stale(root: Path = ROOT) -> list[Plot]:
    """Return the plots whose file is missing or shows other rows than the stored ones."""
    found = []
    for plot in PLOTS:
        path = root / PLOTS_DIR / f"{plot.name}.svg"
        if not path.is_file() or f"rows {digest(plot, root)}" not in path.read_text(encoding="utf-8"):
            found.append(plot)
    return found


def main(argv: list[str] | None = None) -> int:
    """Write or check the plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    old = stale()
    for plot in old:
        path = ROOT / PLOTS_DIR / f"{plot.name}.svg"
        if args.check:
            print(f"{path.relative_to(ROOT)} is not of {RESULTS}/{plot.results}", file=sys.stderr)
        else:
            draw(plot, path)
            print(f"wrote {path.relative_to(ROOT)}")
    if old and args.check:
        print("  fix: scripts/bench.sh --plots", file=sys.stderr)
        return 1
    print("all plots are of the stored results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
