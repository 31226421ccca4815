"""``series ci``: the pipeline, its steps on this machine, and what the steps call."""

from __future__ import annotations

import os
from pathlib import Path

import click

from vllm_series import pins
from vllm_series.ci import patch_table, pipeline, refresh, report, shard, steps
from vllm_series.errors import CheckFailed, UsageError
from vllm_series.ui import emit, json_option, say, workspace


@click.group("ci")
def ci() -> None:
    """Show and run what CI does (docs/ci.md)."""


def register(group: click.Group) -> None:
    """Add the commands of this area to the tool's group."""
    group.add_command(ci)


@ci.command("pipeline")
@click.option(
    "--gpu-queues",
    envvar="SERIES_GPU_QUEUES",
    metavar="TAG,...",
    help="Queue tags that have agents; 'none' leaves the GPU suite out. Default: all.",
)
@click.pass_context
def pipeline_command(ctx: click.Context, gpu_queues: str | None) -> None:
    """Print Buildkite's pipeline as YAML."""
    words = [] if gpu_queues is None else [word.strip() for word in gpu_queues.split(",")]
    tags = None if gpu_queues is None else [tag for tag in words if tag and tag != "none"]
    print(pipeline.render(steps.steps(workspace(ctx), tags)), end="")


@ci.command("run")
@click.argument("keys", metavar="STEP...", nargs=-1)
@click.option("--list", "wants_list", is_flag=True, help="Show the steps.")
@click.pass_context
def run_command(ctx: click.Context, keys: tuple[str, ...], wants_list: bool) -> None:
    """Run STEPs on this machine, in the given order."""
    ws = workspace(ctx)
    if wants_list:
        for step in steps.local_steps(ws):
            where = "" if step.queue == steps.CPU_QUEUE else f"   (queue {step.queue})"
            print(f"{step.key:<22} {step.command}{where}")
        return
    if not keys:
        raise UsageError("no step is given", fix="ci/local.sh --list")
    steps.run(ws, keys)


@ci.command("refresh")
@click.argument("line")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/refresh"), show_default=True)
@json_option
@click.pass_context
def refresh_command(ctx: click.Context, line: str, out: Path, as_json: bool) -> None:
    """Write what `series export LINE` and `series lock LINE` would change in patches/LINE as a diff."""
    ws = workspace(ctx)
    diff = refresh.refresh(ws, pins.load_pin(ws, line))
    path = ws.root / out / f"{line}.patch"
    path.unlink(missing_ok=True)
    if not diff:
        emit({"line": line, "file": None}, as_json=as_json, text=f"line {line}: nothing to refresh")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(diff)
    name = path.relative_to(ws.root) if path.is_relative_to(ws.root) else path
    command = f"git apply {name}"
    text = f"the refreshed patches of {line}, to be taken as they are:\n  "
    if os.environ.get("BUILDKITE"):
        command = f"{report.download(str(name))} && {command}"
        text += f"{command}\nor, in a checkout of this commit:\n  {report.again(line, str(name))}"
    else:
        text += command
    emit({"line": line, "file": str(path), "command": command}, as_json=as_json, text=text)


@ci.command("shard")
@click.argument("line")
@click.option("--index", type=int, envvar="BUILDKITE_PARALLEL_JOB", default=0, show_default=True)
@click.option("--of", type=int, envvar="BUILDKITE_PARALLEL_JOB_COUNT", default=1, show_default=True)
@click.pass_context
def shard_command(ctx: click.Context, line: str, index: int, of: int) -> None:
    """Print the upstream test files that one of several parallel jobs runs, one a line."""
    from vllm_series.baseline.plan import make_plan
    from vllm_series.runtime import pristine_site

    if not 0 <= index < of:
        raise UsageError(f"job {index} of {of}", fix="--index counts from 0 and is below --of")
    ws = workspace(ctx)
    plan = make_plan(ws, pins.load_pin(ws, line).line, pristine_site(ws, line))
    known = {test.path: test.seconds for test in plan.tests}
    seconds = {name: max(known.get(name) or 0.0, 5.0) for name in plan.full()}
    mine = shard.shard(seconds, index, of)
    say(f"job {index} of {of}: {len(mine)} of {len(seconds)} files")
    print("".join(f"{name}\n" for name in mine), end="")


@ci.command("report")
@click.pass_context
def report_command(ctx: click.Context) -> None:
    """Print what the steps left under build/ as Markdown, for an annotation."""
    print(report.markdown(workspace(ctx).root / "build"), end="")


@ci.command("patch-table")
@click.option("--write", is_flag=True, help="Put it into docs/patches.md; without it the page is checked.")
@click.pass_context
def patch_table_command(ctx: click.Context, write: bool) -> None:
    """Make the table of all patches from their trailers."""
    ws = workspace(ctx)
    if patch_table.update(ws.root / "docs/patches.md", patch_table.table(ws), write=write):
        print("docs/patches.md has all patches as they are")
    elif write:
        print("docs/patches.md: wrote the table")
    else:
        raise CheckFailed(
            "docs/patches.md does not show the patches as they are", fix="series ci patch-table --write"
        )
