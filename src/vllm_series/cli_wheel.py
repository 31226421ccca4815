"""``series wheel``: build a patched wheel, try it, or verify one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from vllm_series.errors import UsageError
from vllm_series.files import mebibytes
from vllm_series.ui import emit, json_option, say, workspace
from vllm_series.wheel import gather, install, repack, verify
from vllm_series.wheel.names import WheelName
from vllm_series.wheel.recipe import Recipe
from vllm_series.workspace import Workspace


@click.command("wheel")
@click.argument("line", required=False)
@click.option("--platform", help="x86_64 or aarch64 (default: this machine).")
@click.option("--no-kernels", is_flag=True, help="Leave vllm/_dsa_C.so out; the file name says so.")
@click.option(
    "--system-nvcc", is_flag=True, help="Compile the kernels with this machine's nvcc, not the pinned one."
)
@click.option(
    "--deepgemm",
    "deepgemm_folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of `series deepgemm build`: its extension takes the place of upstream's DeepGEMM.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Folder for the wheel (default: dist/).")
@click.option(
    "--check", "wants_check", is_flag=True, help="Install it into scratch environments and check it."
)
@click.option("--full-check", is_flag=True, help="Also install torch and all dependencies, and import vllm.")
@click.option(
    "--python", metavar="X.Y", default="", help="Python for --full-check (default: the one that runs this)."
)
@click.option(
    "--verify",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Derive this wheel again from the checkout and compare byte by byte.",
)
@json_option
@click.pass_context
def wheel(
    ctx: click.Context,
    line: str | None,
    platform: str | None,
    no_kernels: bool,
    system_nvcc: bool,
    deepgemm_folder: Path | None,
    output: Path | None,
    wants_check: bool,
    full_check: bool,
    python: str,
    file: Path | None,
    as_json: bool,
) -> None:
    """Repack upstream's wheel of LINE with the patches, the overlay and the kernels.

    Nothing but the kernels is compiled. The same checkout and toolchain give the same bytes.
    """
    ws = workspace(ctx)
    if file is not None:
        if line or platform or no_kernels or system_nvcc or output or wants_check or full_check or python:
            raise UsageError(
                "--verify takes line, platform and kernels from the file", fix="give only --verify FILE"
            )
        _verify(ws, file, deepgemm_folder, as_json)
        return
    if not line:
        raise UsageError("LINE is missing", fix="series wheel LINE; `series status` lists the lines")
    if system_nvcc and no_kernels:
        raise UsageError("--system-nvcc and --no-kernels exclude each other", fix="give one of the two")
    if python and not full_check:
        raise UsageError(
            "--python chooses the Python of the full check", fix=f"add --full-check --python {python}"
        )
    start = time.monotonic()
    recipe = gather.gather(
        ws,
        line,
        platform or gather.this_platform(),
        with_kernels=not no_kernels,
        system_nvcc=system_nvcc,
        deepgemm_folder=deepgemm_folder,
    )
    gathered = time.monotonic()
    built = repack.repack(recipe, output or ws.dist, ws.work / "wheel")
    done = time.monotonic()
    if built.reused:
        say(f"up to date, nothing to do: {built.path}")
    else:
        say(f"wrote {built.path}: {mebibytes(built.size)}, repacked in {done - gathered:.1f} s")
    report = None
    if wants_check or full_check:
        report = install.check(ws, built, recipe, full=full_check, python=python)
    data: dict[str, Any] = {
        "wheel": str(built.path),
        "sha256": built.sha256,
        "size": built.size,
        "reused": built.reused,
        "seconds": {"gather": round(gathered - start, 2), "repack": round(done - gathered, 2)},
        **describe(recipe),
        "check": report.as_dict() if report else None,
    }
    emit(data, as_json=as_json, text=summary(data))


def _verify(ws: Workspace, file: Path, deepgemm_folder: Path | None, as_json: bool) -> None:
    claim = verify.claimed(file)
    if WheelName.parse(file.name).has_deepgemm and deepgemm_folder is None:
        raise UsageError(
            f"{file.name} has a DeepGEMM of its own, which the checkout alone does not give",
            fix="name the folder it was built into: --deepgemm DIR",
        )
    recipe = gather.gather(
        ws,
        claim.line,
        claim.platform,
        with_kernels=claim.kernels,
        system_nvcc=claim.system_nvcc,
        deepgemm_folder=deepgemm_folder,
    )
    digest = verify.verify(file, recipe, ws.work / "wheel")
    emit(
        {"wheel": str(file), "sha256": digest, "verified": True, **describe(recipe)},
        as_json=as_json,
        text=f"{file.name}: byte for byte what this checkout builds (sha256 {digest})",
    )


def describe(recipe: Recipe) -> dict[str, Any]:
    """What a wheel contains, for people and for ``--json``."""
    return {
        "line": recipe.pin.line,
        "version": recipe.pin.wheel_version,
        "platform": recipe.platform,
        "torch": recipe.pin.torch,
        "patches": [patch.name for patch in recipe.patches],
        "not_effective": [patch.name for patch in recipe.patches if patch.source_only],
        "overlay_files": len(recipe.packaged_overlay),
        "kernels": recipe.kernels is not None,
        "deepgemm": recipe.deepgemm is not None,
    }


def summary(data: dict[str, Any]) -> str:
    """The description as text for a terminal."""
    patches, skipped = data["patches"], data["not_effective"]
    kernels = "vllm/_dsa_C.so" if data["kernels"] else "none: features that need them decline"
    rows = [
        f"wheel    {data['wheel']}",
        f"sha256   {data['sha256']}",
        f"version  {data['version']} (upstream's wheel, torch {data['torch']})",
        f"patches  {len(patches)}"
        + (f", without effect in a wheel: {', '.join(skipped)}" if skipped else ""),
        f"overlay  {data['overlay_files']} files in vllm/dsa",
        f"kernels  {kernels}",
        f"deepgemm {'patched' if data['deepgemm'] else 'as upstream built it'}",
        f"install  pip install {data['wheel']}",
        "         with --no-deps --force-reinstall in place of an installed vLLM of the same release",
    ]
    return "\n".join(rows)


def register(group: click.Group) -> None:
    """Add this area's commands to the command line."""
    group.add_command(wheel)
