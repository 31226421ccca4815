"""The command line: `series <command>`. Each command does one thing and prints JSON with ``--json``."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from vllm_series import __version__, clone, fetch, lock, pins, redo, stack, state
from vllm_series import apply as applying
from vllm_series import export as exporting
from vllm_series import lint as linting
from vllm_series import verify as verifying
from vllm_series.errors import SeriesError
from vllm_series.ui import emit, json_option, say, workspace
from vllm_series.workspace import Workspace

AREAS = (
    "cli_pin",
    "cli_wheel",
    "cli_kernels",
    "cli_deepgemm",
    "cli_overlay",
    "cli_rebase",
    "cli_baseline",
    "cli_ci",
    "cli_doctor",
    "cli_install",
)
_source = click.option(
    "--source",
    "sources",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder that holds pinned files already.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="series")
@click.option(
    "--root", type=click.Path(path_type=Path), help="The checkout (default: found from the current folder)."
)
@click.pass_context
def cli(ctx: click.Context, root: Path | None) -> None:
    """Carry a patch series on top of pinned vLLM releases.

    Exit codes: 0 ok, 1 a check failed, 2 usage, 3 needs a person, 4 integrity, 5 would lose work, 6 fetch
    failed,
    7 test regression.
    """
    ctx.obj = root


def _lines(ws: Workspace, given: tuple[str, ...]) -> list[str]:
    for line in given:
        pins.load_pin(ws, line)
    return list(dict.fromkeys(given)) or pins.lines(ws)


@cli.command("fetch")
@click.argument("lines", nargs=-1)
@click.option(
    "--wheel", "platforms", multiple=True, help="Also fetch the wheel of this platform (x86_64, aarch64)."
)
@_source
@json_option
@click.pass_context
def fetch_command(
    ctx: click.Context,
    lines: tuple[str, ...],
    platforms: tuple[str, ...],
    sources: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Fetch the pinned files of LINES (default: all) into the cache and check them."""
    ws = workspace(ctx)
    rows = []
    for line in _lines(ws, lines):
        pin = pins.load_pin(ws, line)
        wanted = [pin.source.sdist, *(pins.wheel_of(pin, platform) for platform in platforms)]
        for artifact in wanted:
            path = fetch.fetch(ws, artifact, sources)
            rows.append(
                {"line": line, "file": artifact.filename, "sha256": artifact.sha256, "path": str(path)}
            )
    emit({"files": rows}, as_json=as_json, text="\n".join(f"{row['path']}" for row in rows))


@cli.command("status")
@click.argument("lines", nargs=-1)
@json_option
@click.pass_context
def status_command(ctx: click.Context, lines: tuple[str, ...], as_json: bool) -> None:
    """Show the state of each line's tree in build/."""
    ws = workspace(ctx)
    rows: dict[str, Any] = {}
    text = []
    for line in _lines(ws, lines):
        pin = pins.load_pin(ws, line)
        found = state.inspect(ws, pin)
        rows[line] = {
            "role": pin.role,
            "version": pin.wheel_version,
            **found.as_json(),
            "cached": {artifact.filename: fetch.is_cached(ws, artifact) for artifact in pin.artifacts},
        }
        why = found.detail or "; ".join([*found.dirty[:3], *found.unexported[:3], *found.stale[:3]])
        text.append(f"{line:10} {found.state.value:9} {why}".rstrip())
    emit({"lines": rows}, as_json=as_json, text="\n".join(text))


@cli.command("apply")
@click.argument("line")
@click.option(
    "--discard", is_flag=True, help="Overwrite unexported work; it is kept under refs/series/saved."
)
@click.option("--before", metavar="PATCH", help="Stop before this patch and leave the overlay out.")
@click.option(
    "--git", "url", metavar="URL", help="Take the pinned commit from this clone instead of the sdist."
)
@_source
@json_option
@click.pass_context
def apply_command(
    ctx: click.Context,
    line: str,
    discard: bool,
    before: str | None,
    url: str | None,
    sources: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Lay the patched tree of LINE out in build/LINE."""
    ws = workspace(ctx)
    pin = pins.load_pin(ws, line)
    base = clone.base_from(ws, pin, url, sources) if url else None
    done = applying.apply(ws, pin, discard=discard, before=before, base=base, sources=sources)
    what = f"{len(done.stack.commits)} patches and {len(done.stack.overlay)} overlay files"
    text = (
        f"{done.path}: applied {what}"
        if done.changed
        else f"{done.path}: already applied, nothing to do ({what})"
    )
    if done.saved:
        text += f"\nyour work is kept: git -C {done.path} show {done.saved}"
    data = {
        "line": line,
        "path": str(done.path),
        "changed": done.changed,
        "head": done.stack.head,
        "top": done.stack.top,
        "base": done.stack.base,
        "patches": list(done.stack.patches),
        "overlay_files": len(done.stack.overlay),
        "saved": done.saved,
    }
    emit(data, as_json=as_json, text=text)


@cli.command("export")
@click.argument("line")
@click.option(
    "--drop", multiple=True, metavar="PATCH", help="Agree that this patch is removed from the series."
)
@click.option(
    "--as", "name", metavar="PATCH", help="After `apply --before PATCH`: the one new commit is this patch."
)
@json_option
@click.pass_context
def export_command(
    ctx: click.Context, line: str, drop: tuple[str, ...], name: str | None, as_json: bool
) -> None:
    """Write the commits of build/LINE back to patches/LINE and overlay/."""
    ws = workspace(ctx)
    if name:
        redo.write_one(ws, pins.load_pin(ws, line), name)
        text = f"patches/{line}/{name} is written; next: series lock {line} && series apply {line}"
        emit({"line": line, "changed": True, "rewritten": [name]}, as_json=as_json, text=text)
        return
    plan = exporting.export(ws, pins.load_pin(ws, line), drop=drop)
    lists = {
        "rewritten": plan.rewritten,
        "added": plan.added,
        "dropped": plan.dropped,
        "overlay": list(plan.overlay),
    }
    data = {"line": line, "changed": not plan.empty, **lists}
    rows = [f"{key}: {', '.join(names)}" for key, names in lists.items() if names]
    if plan.added:
        drops = " ".join(f"--drop {name}" for name in plan.added)
        rows.append(
            "  a new patch needs trailers: series lint; to change an existing patch instead: git rebase -i "
            f"in build/{line}, `fixup` below that patch, then series export {line} {drops}"
        )
    emit(data, as_json=as_json, text="\n".join(rows) or f"line {line}: nothing to export")


@cli.command("lock")
@click.argument("lines", nargs=-1)
@json_option
@click.pass_context
def lock_command(ctx: click.Context, lines: tuple[str, ...], as_json: bool) -> None:
    """Apply the patches of LINES (default: all) strictly and write their LOCK."""
    ws = workspace(ctx)
    changed = {}
    for line in _lines(ws, lines):
        pin = pins.load_pin(ws, line)
        with applying.line_lock(ws, line):
            changed[line] = lock.write(ws, lock.lock_of(ws, stack.current(ws, pin)))
    text = "\n".join(f"{line}: LOCK {'written' if new else 'unchanged'}" for line, new in changed.items())
    emit({"changed": changed}, as_json=as_json, text=text)


@cli.command("verify")
@click.argument("lines", nargs=-1)
@_source
@json_option
@click.pass_context
def verify_command(
    ctx: click.Context, lines: tuple[str, ...], sources: tuple[Path, ...], as_json: bool
) -> None:
    """Prove that pins, patches, overlay and LOCK of LINES (default: all) belong together."""
    ws = workspace(ctx)
    found = verifying.verify(ws, _lines(ws, lines), sources)
    text = []
    for line, steps in found.items():
        for step in steps:
            text.append(
                f"{line:10} {step.name:12} {'ok' if step.ok else 'FAIL':4} {step.seconds:5.1f} s"
                f"  {step.detail}"
            )
            if step.error:
                text.append("    " + str(step.error).replace("\n", "\n    "))
    errors = [step.error for steps in found.values() for step in steps if step.error]
    rows = {line: [step.as_json() for step in steps] for line, steps in found.items()}
    emit({"ok": not errors, "lines": rows}, as_json=as_json, text="\n".join(text))
    if errors:
        ctx.exit(max(error.exit_code for error in errors))


@cli.command("lint")
@click.argument("lines", nargs=-1)
@json_option
@click.pass_context
def lint_command(ctx: click.Context, lines: tuple[str, ...], as_json: bool) -> None:
    """Check patches, trailers, series and overlay of LINES (default: all) against the rules."""
    ws = workspace(ctx)
    problems = list(dict.fromkeys(row for line in _lines(ws, lines) for row in linting.lint(ws, line)))
    emit(
        {"ok": not problems, "problems": [asdict(row) for row in problems]},
        as_json=as_json,
        text="\n".join(map(str, problems)) or "no problems",
    )
    if problems:
        ctx.exit(1)


def _register_areas(group: click.Group) -> None:
    """Let each area that is there add its commands: ``cli_<area>.register(group)``."""
    for name in AREAS:
        if importlib.util.find_spec(f"vllm_series.{name}"):
            try:
                importlib.import_module(f"vllm_series.{name}").register(group)
            except ImportError as err:  # an environment from before the area got its dependency
                say(f"note: the commands of {name} are missing: {err} (fix: uv sync)")


def _print_error(message: str, fix: str, exit_code: int) -> None:
    print(json.dumps({"error": message, "fix": fix, "exit_code": exit_code}, indent=2))


def main(argv: list[str] | None = None) -> None:
    """Entry point: runs a command and turns expected errors into a message with its ``fix`` and an exit
    code."""
    args = sys.argv[1:] if argv is None else argv
    try:
        _register_areas(cli)
        code = cli.main(args=args, prog_name="series", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except SeriesError as err:
        if "--json" in args:
            _print_error(err.message, err.fix, err.exit_code)
        say(f"error: {err}")
        sys.exit(err.exit_code)
    except OSError as err:
        if err.errno not in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}:
            raise
        message = f"{err.filename or 'cannot write'}: {err.strerror}"
        fix = "mend the permissions or free some space, then run the command again"
        if "--json" in args:
            _print_error(message, fix, 6)
        say(f"error: {message}\n  fix: {fix}")
        sys.exit(6)
    except click.exceptions.Exit as err:
        sys.exit(err.exit_code)
    except click.ClickException as err:
        if "--json" in args:
            context = getattr(err, "ctx", None)
            named = context.command_path if context else "series"
            _print_error(err.format_message(), f"see `{named} --help`", err.exit_code)
        err.show()
        sys.exit(err.exit_code)
    except (KeyboardInterrupt, click.Abort):
        say("interrupted; run the command again, it goes on where it stopped")
        sys.exit(130)


if __name__ == "__main__":
    main()
