"""``series install``: this series in an environment that has vLLM, and `--undo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vllm_series import fetch, pins
from vllm_series.errors import UsageError
from vllm_series.files import sha256_of
from vllm_series.install import inplace, wheels
from vllm_series.install.environment import Environment, default_python, look
from vllm_series.lock_file import locked
from vllm_series.ui import emit, json_option, workspace
from vllm_series.wheel import gather
from vllm_series.wheel.recipe import Recipe
from vllm_series.wheel.uvtool import Uv, find_uv
from vllm_series.workspace import Workspace


@click.command("install")
@click.argument("line", required=False)
@click.option(
    "--python", type=click.Path(path_type=Path), help="Its Python (default: the active environment)."
)
@click.option(
    "--wheel", "file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="This wheel."
)
@click.option("--files", is_flag=True, help="Only lay the patched files over the installed upstream wheel.")
@click.option("--no-kernels", is_flag=True, help="With --files: leave vllm/_dsa_C.so out.")
@click.option("--undo", is_flag=True, help="Bring upstream's vLLM back.")
@click.option("--force", is_flag=True, help="With --undo: give up changes made by hand in our files.")
@json_option
@click.pass_context
def install(
    ctx: click.Context,
    line: str | None,
    python: Path | None,
    file: Path | None,
    files: bool,
    no_kernels: bool,
    undo: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Put the series of LINE into an environment that has the same release of vLLM.

    Default: the wheel of LINE from dist/ (scripts/build.sh makes it). All files are compared by hash.
    """
    ws = workspace(ctx)
    if undo and (line or file or files):
        raise UsageError("--undo finds out itself what there is to undo", fix="series install --undo")
    if force and not undo:
        raise UsageError("--force belongs to --undo", fix="series install --undo --force")
    if no_kernels and not files:
        raise UsageError(
            "--no-kernels belongs to --files",
            fix="scripts/build.sh --no-kernels makes such a wheel; --wheel FILE",
        )
    if files and file:
        raise UsageError("--files and --wheel exclude each other", fix="give one of them")
    if line:
        pins.load_pin(ws, line)  # a line that does not exist is said before an environment that is missing
    env = look(default_python(python))
    key = sha256_of(str(env.vllm.site if env.vllm else env.python).encode())[:16]
    with locked(ws.cache / "locks" / f"install-{key}"):
        if undo:
            data = _undo(ws, env, force)
        elif files:
            data = _lay(ws, env, _known(ws, line, env), with_kernels=not no_kernels)
        else:
            data = _wheel(ws, env, file or _built(ws, _known(ws, line, env)))
    emit({"python": str(env.python), **data}, as_json=as_json, text=data["text"])


def register(group: click.Group) -> None:
    """Add the command to ``series``."""
    group.add_command(install)


def _known(ws: Workspace, line: str | None, env: Environment) -> str:
    """The line: the given one, else that of the installed release."""
    if line:
        return pins.load_pin(ws, line).line
    if env.vllm is None:
        raise UsageError(
            f"{env.python} has no vLLM", fix="pip install the wheel from dist/ with its dependencies"
        )
    lines = {pins.load_pin(ws, one).version: one for one in pins.lines(ws)}
    if env.vllm.upstream not in lines:
        raise UsageError(
            f"{env.python} has vLLM {env.vllm.version}, this series has lines for {', '.join(lines)}",
            fix="use an environment with one of them",
        )
    return lines[env.vllm.upstream]


def _built(ws: Workspace, line: str) -> Path:
    pin = pins.load_pin(ws, line)
    found = sorted(ws.dist.glob(f"vllm-{pin.wheel_version}-*{gather.this_platform()}.whl"))
    if len(found) != 1:
        raise UsageError(
            f"dist/ has {len(found) or 'no'} wheels of {pin.wheel_version} for this machine",
            fix=f"scripts/build.sh {line}" if not found else "name one with --wheel",
        )
    return found[0]


def layer_of(recipe: Recipe) -> inplace.Layer:
    """What a wheel of this recipe changes in ``vllm/``; the package's own version stays upstream's."""
    from vllm_series.wheel.repack import new_members

    made = {
        path: data
        for path, data in new_members(recipe).items()
        if path.startswith("vllm/") and path != "vllm/_version.py"
    }
    gone = [path for path, data in recipe.changed.items() if data is None and path.startswith("vllm/")]
    here = sorted(path for path in (*made, *gone) if path in recipe.base_blobs)
    base = recipe.read_base([recipe.base_blobs[path] for path in here])
    return inplace.Layer(
        version=recipe.pin.wheel_version,
        upstream=recipe.pin.version,
        files={**made, **dict.fromkeys(gone)},
        base={path: sha256_of(data) for path, data in zip(here, base, strict=True)},
    )


def _lay(ws: Workspace, env: Environment, line: str, *, with_kernels: bool) -> dict[str, Any]:
    if env.vllm is None:
        raise UsageError(f"{env.python} has no vLLM to lay files over", fix=f"pip install vllm=={line}")
    inplace.refuse_other(env.vllm, pins.load_pin(ws, line).version)  # before kernels are built for it
    recipe = gather.gather(ws, line, gather.this_platform(), with_kernels=with_kernels)
    layer = layer_of(recipe)
    new = inplace.install(env.vllm, layer)
    done = "are laid over" if new else "lie already over"
    text = f"{layer.version}: {len(layer.files)} files {done} vLLM {env.vllm.version} in {env.vllm.site}"
    undo = f"series install --undo --python {env.python}"
    return {
        "changed": new,
        "version": layer.version,
        "files": len(layer.files),
        "text": f"{text}\nback: {undo}",
    }


def _wheel(ws: Workspace, env: Environment, wheel: Path) -> dict[str, Any]:
    if env.vllm is not None and inplace.journal(env.vllm):
        inplace.take_off(env.vllm)
    found = wheels.replace(Uv(find_uv(ws)), env, wheel)
    text = f"{found.version} in {found.site}, each file as the wheel's RECORD says"
    return {
        "changed": True,
        "version": found.version,
        "text": f"{text}\nback: series install --undo --python {env.python}",
    }


def _undo(ws: Workspace, env: Environment, force: bool) -> dict[str, Any]:
    at = env.vllm
    if at is None:
        raise UsageError(f"{env.python} has no vLLM", fix="nothing is to be undone there")
    if at.ours:
        pin = pins.load_pin(ws, _known(ws, None, env))
        wheel = fetch.fetch(ws, pins.wheel_of(pin, gather.this_platform()))
        found = wheels.replace(Uv(find_uv(ws)), env, wheel)
        return {"changed": True, "version": found.version, "text": f"upstream's vLLM {found.version} is back"}
    changed = inplace.take_off(at, force=force)
    text = f"upstream's files of vLLM {at.version} are back" if changed else "nothing to undo"
    return {"changed": changed, "version": at.version, "text": text}
