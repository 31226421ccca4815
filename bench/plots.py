# SPDX-License-Identifier: Apache-2.0
"""Makes the plots in docs/plots from the stored results alone.

    python bench/plots.py            # writes what changed
    python bench/plots.py --check    # says which plots are not of the stored results; exit code 1

Each SVG names, in its description, a digest of the rows and of the settings that it was made from, so that a
stored plot can be compared with the results whatever matplotlib draws on another machine. A plot of OFFERED
is drawn once its file has rows for it; a page must then show it, as each of PLOTS.
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
LAYOUT = 2  # raise when the drawing itself changes


@dataclass(frozen=True)
class Plot:
    """One figure of one results file.

    Attributes:
        name: file name in docs/plots, without suffix.
        results: file under bench/results.
        title: what is shown, with the card.
        select: expression that a row's case matches as a whole; group ``x`` is a number, the others name the
            curve.
        label: one curve's name, a format string with the other groups.
        x_label: what the x axis is.
        metric: of the rows.
        value: ``times``: baseline and ours; ``ratio``: how many times faster ours is; ``series``: the row's
            memory after each ``step`` up to ``x`` (both groups of the case), baseline and ours.
        near_one: ratios close to 1: the axis does not start at 0.
        x_log: the x axis is logarithmic.
    """

    name: str
    results: str
    title: str
    select: str
    label: str
    x_label: str
    metric: str = "time"
    value: str = "times"
    near_one: bool = False
    x_log: bool = True


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

DECODE = r"mode=(?P<mode>wk|full) phase=decode heads=16 index=64 graph=FULL\w* B=(?P<x>\d+) ctx=(?P<ctx>\d+)"

OFFERED = (
    Plot(
        "overlap-decode",
        "overlap/0.33.0-h200.json",
        "decode graph on an H200 with the indexer overlapped, against off (16 / 64 heads)",
        DECODE,
        "{mode}, context {ctx}",
        "sequences",
        metric="graph",
        value="ratio",
        near_one=True,
    ),
    Plot(
        "overlap_compiled-decode",
        "overlap/0.28.0-h200.json",
        "decode graph of line 0.28.0 on an H200 with the indexer overlapped, against off (16 / 64 heads)",
        # Batches of up to 64, as at every context; larger ones were measured at others.
        DECODE.replace("wk|full", "wk|full|native").replace(r"B=(?P<x>\d+)", r"B=(?P<x>\d\d?)"),
        "{mode}, context {ctx}",
        "sequences",
        metric="graph",
        value="ratio",
        near_one=True,
    ),
    Plot(
        "litedsa-operator",
        "litedsa/0.33.0-h200.json",
        "LiteDSA on an H200 against FLASH_ATTN_MLA_SPARSE, 16384 queries, bf16 cache",
        r"heads=(?P<heads>\d+) T=16384 u=(?P<x>[\d.]+) base=FLASH_ATTN_MLA_SPARSE",
        "{heads} heads",
        "keys of a group's union, in units of 2048",
        value="ratio",
        x_log=False,
    ),
    Plot(
        "logits_slab-operator",
        "deepgemm/0.33.0-h200.json",
        "memory reserved on an H200 while a prompt is scored: upstream (dashed) and ours",
        r"slab S=(?P<x>\d+) step=(?P<step>\d+)",
        "steps of {step}",
        "tokens of context",
        metric="peak_MiB",
        value="series",
        x_log=False,
    ),
    Plot(
        "logits_slab-engine",
        "deepgemm/0.33.0-h200.json",
        "memory reserved in the engine on an H200: upstream (dashed) and ours",
        r"slab e2e heads=16 index=64 S=(?P<x>\d+) step=(?P<step>\d+)",
        "steps of {step}",
        "tokens of context",
        metric="peak_MiB",
        value="series",
        x_log=False,
    ),
    Plot(
        "logits_slab-engine-0.28.0",
        "deepgemm/0.28.0-h200.json",
        "memory reserved in the engine of 0.28.0 on an H200: upstream (dashed) and ours",
        r"slab e2e heads=16 index=64 S=(?P<x>\d+) step=(?P<step>\d+)",
        "steps of {step}",
        "tokens of context",
        metric="peak_MiB",
        value="series",
        x_log=False,
    ),
)


def curves(plot: Plot, root: Path = ROOT) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    """Return the rows of each curve, by its label and rising x; of several rows of a case the last counts."""
    path = root / RESULTS / plot.results
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    except (ValueError, KeyError, TypeError) as error:
        sys.exit(f"error: {path} cannot be read: {error}\n  fix: git checkout {RESULTS}/{plot.results}")
    found: dict[str, tuple[tuple[Any, ...], dict[float, dict[str, Any]]]] = {}
    for row in rows:
        match = re.fullmatch(plot.select, row["case"])
        if match is None or row["metric"] != plot.metric:
            continue
        if plot.value == "series" and "series_MiB" not in row:
            continue
        names = match.groupdict()
        x = float(names.pop("x"))
        # Numbers in the order of their size: 4096 before 32768.
        order = tuple((0, int(v), "") if v.isdigit() else (1, 0, v) for v in names.values())
        found.setdefault(plot.label.format(**names), (order, {}))[1][x] = row | {"groups": names}
    return {label: sorted(one.items()) for label, (_, one) in sorted(found.items(), key=lambda i: i[1][0])}


def points(plot: Plot, root: Path = ROOT) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    """Return `curves`; of a series only that of the longest context.

    Raises:
        SystemExit: no row fits, so the plot would be empty.
    """
    found = curves(plot, root)
    if not found:
        sys.exit(f"error: {plot.results} has no row for {plot.name}")
    if plot.value == "series":
        return {label: rows[-1:] for label, rows in found.items()}
    return found


def offered(root: Path = ROOT) -> list[Plot]:
    """Return the plots of OFFERED that have rows: a curve of two points, or a series."""
    return [
        plot
        for plot in OFFERED
        if any(len(rows) > 1 or plot.value == "series" for rows in curves(plot, root).values())
    ]


def digest(plot: Plot, root: Path = ROOT) -> str:
    """Return what identifies a figure: settings and the figures that it shows."""
    shown = {
        label: [
            (x, row["baseline"], row["ours"], row["ratio"], row["unit"], row.get("series_MiB"))
            for x, row in one
        ]
        for label, one in points(plot, root).items()
    }
    text = json.dumps([LAYOUT, asdict(plot), shown], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def draw(plot: Plot, target: Path, root: Path = ROOT) -> None:
    """Write the figure as SVG; the same input and matplotlib give the same bytes."""
    try:
        import matplotlib
    except ImportError as error:
        sys.exit(f"error: {error}\n  fix: scripts/bench.sh --plots, which has it, or pip install matplotlib")
    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = {"svg.hashsalt": plot.name, "svg.fonttype": "none", "font.size": 10}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        unit = ""
        for number, (label, rows) in enumerate(points(plot, root).items()):
            xs = [x for x, _ in rows]
            unit, color = rows[0][1]["unit"], f"C{number}"
            if plot.value == "ratio":
                axes.plot(xs, [row["ratio"] for _, row in rows], "o-", color=color, label=label)
            elif plot.value == "series":
                for way, line in (("ours", "-"), ("baseline", "--")):
                    gib = [mib / 1024 for mib in rows[0][1]["series_MiB"][way]]
                    step = int(rows[0][1]["groups"]["step"])
                    steps = [step * (number + 1) for number in range(len(gib))]
                    axes.plot(steps, gib, line, color=color, label=label if way == "ours" else None)
            else:
                axes.plot(xs, [row["ours"] for _, row in rows], "o-", color=color, label=label)
                axes.plot(xs, [row["baseline"] for _, row in rows], "o--", color=color)
        if plot.x_log:
            axes.set_xscale("log", base=2)
        if plot.value == "ratio":
            axes.axhline(1.0, color="grey", linewidth=1)
            axes.set_ylabel("times faster")
            if not plot.near_one:
                axes.set_ylim(bottom=0)
        elif plot.value == "series":
            axes.set_ylabel("GiB")
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
    """Return the plots, offered ones too, whose file is missing or shows other rows than the stored ones."""
    found = []
    for plot in [*PLOTS, *offered(root)]:
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
            shown = "" if plot in PLOTS else f"; a page of docs/ shows it with ![...](plots/{plot.name}.svg)"
            print(f"wrote {path.relative_to(ROOT)}{shown}")
    if old and args.check:
        print("  fix: scripts/bench.sh --plots", file=sys.stderr)
        return 1
    print("all plots are of the stored results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
