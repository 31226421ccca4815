"""Commands of the pins: `series pin list` and `series pin add VERSION`."""

from __future__ import annotations

from pathlib import Path

import click

from vllm_series import pin_add, pins
from vllm_series.ui import emit, json_option, workspace


def register(group: click.Group) -> None:
    """Add the ``pin`` commands to the command line."""
    group.add_command(pin)


@click.group()
def pin() -> None:
    """Show the pinned upstream releases, add one."""


@pin.command("list")
@json_option
@click.pass_context
def list_command(ctx: click.Context, as_json: bool) -> None:
    """List the lines with their upstream, newest first."""
    ws = workspace(ctx)
    found = [pins.load_pin(ws, line) for line in pins.lines(ws)]
    rows = [
        {
            "line": one.line,
            "role": one.role,
            "version": one.version,
            "wheel_version": one.wheel_version,
            "commit": one.source.commit,
            "torch": one.torch,
            "platforms": list(one.wheels),
        }
        for one in found
    ]
    text = [
        f"{o.line:10} {o.role:10} {o.wheel_version:16} commit {o.source.commit} torch {o.torch}"
        for o in found
    ]
    emit({"lines": rows}, as_json=as_json, text="\n".join(text))


@pin.command("add")
@click.argument("version")
@click.option("--yanked", is_flag=True, help="Accept a release that was yanked.")
@click.option(
    "--source", "sources", multiple=True, type=click.Path(path_type=Path), help="Folder with its files."
)
@json_option
@click.pass_context
def add_command(
    ctx: click.Context, version: str, yanked: bool, sources: tuple[Path, ...], as_json: bool
) -> None:
    """Fetch upstream release VERSION, check it, and write pins/VERSION.toml."""
    ws = workspace(ctx)
    done = pin_add.add(ws, version, sources, yanked=yanked)
    data = {
        "line": done.pin.line,
        "pin": f"pins/{done.pin.line}.toml",
        "commit": done.pin.source.commit,
        "tree": done.pin.source.tree,
        "torch": done.pin.torch,
        "deepgemm": f"{done.pin.deepgemm_repository}@{done.pin.deepgemm_commit}",
        "equal_files": done.compared,
    }
    text = "\n".join(f"{key}: {value}" for key, value in data.items())
    emit(data, as_json=as_json, text=text + f"\nnext: series rebase --to {done.pin.line}")
