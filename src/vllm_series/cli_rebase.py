"""`series rebase`, `canary`, `bisect` and `review`: the series on other releases, and what a change does."""

from __future__ import annotations

import json
from pathlib import Path

import click

from vllm_series import pins
from vllm_series.errors import NeedsPerson, UsageError
from vllm_series.files import write_atomic
from vllm_series.rebase import bisect, canary, review, session, table, trial
from vllm_series.rebase.model import Report
from vllm_series.rebase.render import markdown
from vllm_series.ui import emit, json_option, workspace

_CLONE = "A clone of upstream: for its history, or for a commit to go to."


def register(group: click.Group) -> None:
    """Add the commands of this area to the command line."""
    for command in (rebase_command, canary_command, bisect_command, review_command):
        group.add_command(command)


@click.command("rebase")
@click.argument("line", required=False)
@click.option("--to", metavar="NEW", help="Release, `latest`, or with --git a commit, tag or branch.")
@click.option("--git", "url", default="", metavar="URL", help=_CLONE)
@click.option("--report", is_flag=True, help="Try all patches in a throw-away tree and write nothing.")
@click.option("--continue", "go_on", is_flag=True, help="Go on after a stop or a kill.")
@click.option("--abort", is_flag=True, help="Give up; edits are kept under a ref.")
@click.option("--accept", multiple=True, metavar="PATCH", help="Take a MERGED, UNREACHED or moved patch.")
@click.option("--drop", multiple=True, metavar="PATCH", help="Leave a patch out of the new line.")
@click.option("--table", "make_table", is_flag=True, help="Measure all pairs; update docs/rebase.md.")
@json_option
@click.pass_context
def rebase_command(
    ctx: click.Context,
    line: str | None,
    to: str | None,
    url: str,
    report: bool,
    go_on: bool,
    abort: bool,
    accept: tuple[str, ...],
    drop: tuple[str, ...],
    make_table: bool,
    as_json: bool,
) -> None:
    """Carry the patches of LINE over to another release, as a new line.

    Exit code 3: a patch needs a person; what to do is printed. See docs/rebase.md.
    """
    ws = workspace(ctx)
    if sum((report, go_on, abort, make_table)) > 1:
        raise UsageError(
            "--report, --continue, --abort and --table exclude each other", fix="give one of them"
        )
    wish = session.Wish(accept, drop, url)
    if make_table:
        data = table.measure(ws)
        table.save(ws, data)
        emit(data, as_json=as_json, text=table.markdown(data).strip())
    elif abort:
        kept = session.abort(ws, to)
        text = "gave the rebase up" + (f"; the edits: git -C .work/odb.git show {kept}" if kept else "")
        emit({"aborted": True, "kept": kept}, as_json=as_json, text=text)
    elif go_on:
        _show(ctx, session.go_on(ws, to, wish), as_json)
    elif not line or not to:
        raise UsageError("a rebase needs a line and a release", fix="series rebase LINE --to NEW (or latest)")
    elif not report:
        _show(ctx, session.start(ws, line, to, wish), as_json)
    else:
        old, new = session.sides(ws, line, to, url)
        past = session.history(ws, url, old, new)
        done = trial.run(ws, trial.steps_of(ws, line), old, new, history=past, accept=accept, drop=drop)
        _show(ctx, done.report, as_json)


def _show(ctx: click.Context, report: Report, as_json: bool) -> None:
    emit(report.as_json(), as_json=as_json, text=markdown(report).rstrip("\n"))
    if not report.clean:
        ctx.exit(NeedsPerson.exit_code)


@click.command("canary")
@click.argument("line", required=False)
@click.option("--to", default="latest", metavar="NEW", help="Another release than the newest.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Also write canary.md and .json here."
)
@json_option
@click.pass_context
def canary_command(ctx: click.Context, line: str | None, to: str, out: Path | None, as_json: bool) -> None:
    """Try LINE (default: the current one) on the newest release; exit code 3 if a person is needed."""
    report = canary.canary(workspace(ctx), line, to)
    if out:
        write_atomic(out / "canary.md", markdown(report))
        write_atomic(out / "canary.json", json.dumps(report.as_json(), indent=1) + "\n")
    _show(ctx, report, as_json)


@click.command("bisect", context_settings={"ignore_unknown_options": True})
@click.argument("line")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@json_option
@click.pass_context
def bisect_command(ctx: click.Context, line: str, command: tuple[str, ...], as_json: bool) -> None:
    """Find the patch of LINE that makes COMMAND fail: series bisect LINE -- COMMAND ...

    COMMAND runs in a tree with the first patches and the overlay. It says good (exit code 0), bad (1 to 124)
    or skip (125). Exit code 1: a patch or the overlay is to blame; 0: the command does not fail, or upstream
    is.
    """
    ws = workspace(ctx)
    verdict = bisect.bisect(ws, pins.load_pin(ws, line), command)
    emit(verdict.as_json(), as_json=as_json, text=verdict.text())
    if verdict.guilty not in {"", bisect.PRISTINE}:
        ctx.exit(1)


@click.command("review")
@click.argument("span", metavar="BASE..HEAD")
@json_option
@click.pass_context
def review_command(ctx: click.Context, span: str, as_json: bool) -> None:
    """Show what the change of patches in BASE..HEAD does to the patched trees."""
    changes = review.review(workspace(ctx), span)
    emit(review.as_json(changes, span), as_json=as_json, text=review.markdown(changes, span).rstrip("\n"))
