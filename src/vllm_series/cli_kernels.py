"""``series kernels``: build the kernel library and say what is in it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from vllm_series import kernels
from vllm_series.files import sha256_file
from vllm_series.kernels.build import export
from vllm_series.ui import emit, json_option, workspace


@click.group("kernels")
def group() -> None:
    """Build vllm/_dsa_C.so (see docs/kernels.md) and look into it."""


@group.command("build")
@click.option("--system-nvcc", is_flag=True, help="Use this machine's nvcc instead of the pinned one.")
@click.option("--jobs", type=click.IntRange(1), help="Compilations at a time (default: one per processor).")
@click.option("--force", is_flag=True, help="Compile everything anew, even if nothing changed.")
@click.option(
    "--source",
    "sources",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder that may hold the packages of the pinned nvcc (repeatable).",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Copy it to this file.")
@json_option
@click.pass_context
def build_command(
    ctx: click.Context,
    system_nvcc: bool,
    jobs: int | None,
    force: bool,
    sources: tuple[Path, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """Build the library; without changes this takes a second and returns the cached one."""
    made = kernels.build(workspace(ctx), system_nvcc=system_nvcc, jobs=jobs, force=force, sources=sources)
    if output is not None:
        export(made, output)
    path = output or made.library
    data = {"library": str(path), "sha256": made.sha256, "reused": made.reused, "provenance": made.provenance}
    note = " (unchanged, from the cache)" if made.reused else ""
    emit(data, as_json=as_json, text=f"{path}\nsha256 {made.sha256}{note}")


@group.command("info")
@click.argument("library", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
def info_command(library: Path, as_json: bool) -> None:
    """Show what LIBRARY exports and needs, and check it against what docs/kernels.md promises."""
    facts = kernels.inspect(library)
    data = {"library": str(library), "sha256": sha256_file(library), **facts.as_dict()}
    emit(data, as_json=as_json, text=json.dumps(data, indent=2))
    kernels.check(facts)


def register(root: click.Group) -> None:
    """Add the commands of this area to ``series``."""
    root.add_command(group)
