"""``series deepgemm``: patches of DeepGEMM, its extension for a wheel, the reference for the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from vllm_series import pins
from vllm_series.deepgemm import build, patchfile, reference
from vllm_series.errors import CheckFailed
from vllm_series.ui import emit, json_option, workspace

_source = click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group("deepgemm")
def group() -> None:
    """DeepGEMM with MQA logits into a buffer of the caller (see docs/deepgemm.md)."""


@group.command("status")
@click.argument("line")
@_source
@json_option
@click.pass_context
def status_command(ctx: click.Context, line: str, source: Path, as_json: bool) -> None:
    """Say whether SOURCE, a DeepGEMM source, has the patch of LINE; exit code 1 if it does not fit."""
    ws = workspace(ctx)
    patch = patchfile.patch_of(ws, pins.load_pin(ws, line))
    state = patch.state(source)
    emit({"line": line, "source": str(source), "state": str(state)}, as_json=as_json, text=str(state))
    if state is patchfile.State.WRONG:
        raise CheckFailed(
            f"{patch.file.name} does not apply to {source}",
            fix=f"use the source it belongs to: {patch.what} {patch.id}",
        )


@group.command("patch")
@click.argument("line")
@_source
@click.pass_context
def patch_command(ctx: click.Context, line: str, source: Path) -> None:
    """Put the patch of LINE on SOURCE; a source that has it stays as it is."""
    ws = workspace(ctx)
    patch = patchfile.patch_of(ws, pins.load_pin(ws, line))
    applied = patch.apply(source)
    emit({}, as_json=False, text=f"{source}: {'patched' if applied else 'has the patch already'}")


@group.command("build")
@click.argument("line")
@click.option(
    "--source",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="DeepGEMM source of the line's commit (default: $DEEPGEMM_SRC_DIR, else it is cloned).",
)
@click.option(
    "--torch-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Python with a CUDA build of the line's torch (default: $DEEPGEMM_TORCH_PYTHON, else this one).",
)
@click.option(
    "--python",
    "pythons",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Python to build for, on a line with one extension per version (default: those in "
    "$DEEPGEMM_PYTHON_INTERPRETERS, ':' between them).",
)
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder for the files."
)
@json_option
@click.pass_context
def build_command(
    ctx: click.Context,
    line: str,
    source: Path | None,
    torch_python: Path | None,
    pythons: tuple[Path, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """Build the extension of LINE's patched DeepGEMM (C++ alone) for `series wheel LINE --deepgemm`."""
    ws = workspace(ctx)
    named = os.environ.get("DEEPGEMM_SRC_DIR")
    listed = os.environ.get("DEEPGEMM_PYTHON_INTERPRETERS", "")
    target = output or build.folder(ws, line)
    record = build.build(
        ws,
        pins.load_pin(ws, line),
        given=source or (Path(named) if named else None),
        torch_python=torch_python or Path(os.environ.get("DEEPGEMM_TORCH_PYTHON") or sys.executable),
        pythons=pythons or [Path(one) for one in listed.split(":") if one],
        output=target,
    )
    text = "\n".join(str(target / name) for name in record["files"])
    emit({"folder": str(target), **record}, as_json=as_json, text=text)


@group.command("reference")
@click.option(
    "--torch-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="Python with a CUDA build of torch.",
)
@click.option(
    "--python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Python that will import it (default: the same).",
)
@click.option("-O", "level", default="0", show_default=True, help="g++'s optimisation level.")
@click.pass_context
def reference_command(ctx: click.Context, torch_python: Path, python: Path | None, level: str) -> None:
    """Build the patched reference DeepGEMM and print the folder to put on PYTHONPATH."""
    print(reference.build(workspace(ctx), torch_python, python, optimise=f"-O{level}"))


def register(root: click.Group) -> None:
    """Add the commands of this area to ``series``."""
    root.add_command(group)
