"""``series doctor``: what this environment and this machine give to the features, in one screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from vllm_series.doctor import report
from vllm_series.errors import UsageError
from vllm_series.install.environment import default_python
from vllm_series.ui import emit, json_option, workspace


@click.command("doctor")
@click.option(
    "--python", type=click.Path(path_type=Path), help="Its Python (default: the active environment)."
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, python: Path | None, as_json: bool) -> None:
    """Show which vLLM is installed, which features it would use for which models, and what is in the way.

    Exit code 1 if the installation is broken; a card or a switch that keeps a feature off is no fault.
    """
    ws = workspace(ctx)
    try:
        chosen = default_python(python)
    except UsageError:
        if python is not None:
            raise
        chosen = None
    data = report.examine(ws, chosen)
    if as_json:
        emit(data, as_json=True)
    else:
        show(data, Console())
    if data["vllm"] and data["vllm"]["problem"]:
        ctx.exit(1)


def register(group: click.Group) -> None:
    """Add the command to ``series``."""
    group.add_command(doctor)


def show(data: dict[str, Any], console: Console) -> None:
    """Print the report for a person."""
    for name, text in facts(data):
        console.print(f"{name:<10} {text}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    for name, row in data["features"].items():
        state = f"{row['state']} ({row['reason']})" if row["reason"] else row["state"]
        console.print(f"{name:<12} {state}", markup=False, highlight=False, soft_wrap=True)
    names = list(next(iter(data["models"].values())))
    if names:
        console.print(f"\nwhere a feature applies once it is active ({report.REACH}):", highlight=False)
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for name in names:
            table.add_column(name, no_wrap=True)
        for model, reach in data["models"].items():
            table.add_row(model, *(in_short(reach[name]) for name in names))
        console.print(table, markup=False, highlight=False)
    else:
        console.print(f"\nwhich model reaches which feature: {report.REACH}", highlight=False)
    for row in data["advice"]:
        console.print(f"\n! {row['problem']}", markup=False, highlight=False, soft_wrap=True)
        if row["fix"] != "none":
            console.print(f"  fix: {row['fix']}", markup=False, highlight=False, soft_wrap=True)


def in_short(words: str) -> str:
    """One word of the table in docs/features.md: yes, no, off, declines, or `partly` for a longer answer."""
    first = words.partition(" ")[0].rstrip(":;,.")
    return first if first in ("yes", "no", "off", "declines") else "no" if first == "not" else "partly"


def facts(data: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines at the top: name and text."""
    rows = [("series", ", ".join(data["series"].values()) + " in this checkout")]
    if data["python"] is None:
        return [*rows, ("vllm", "none: no environment is named")]
    rows.append(("python", f"{data['python']['path']} ({data['python']['version']})"))
    vllm, torch, dsa = data["vllm"], data["torch"], data["dsa"] or {}
    rows.append(("vllm", f"{vllm['version']}, {vllm['kind']}, in {vllm['site']}" if vllm else "none"))
    if "error" in torch:
        rows.append(("torch", f"none: {torch['error']}"))
    else:
        rows.append(("torch", f"{torch['version']}, CUDA {torch['cuda'] or 'none'}"))
        names = [f"{card['name']} ({card['capability']})" for card in torch["cards"]]
        kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
        rows.append(("cards", ", ".join(kinds) or "none"))
        rows.append(("driver", data["driver"] or "none (no nvidia-smi)"))
    if vllm:
        gemm = data["deepgemm"] or {}
        rows.append(("deepgemm", gemm.get("module") or f"none: {gemm.get('error')}"))
        kernels = dsa.get("kernels") or {"reason": dsa.get("error")}
        rows.append(("kernels", kernels.get("build") or f"none: {kernels.get('reason')}"))
    if dsa.get("enabled") is False:
        rows.append(("VLLM_DSA", "0: everything of this series is off"))
    return rows
