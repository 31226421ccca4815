"""``series overlay-test``: the overlay's tests in the patched trees."""

from __future__ import annotations

import click

from vllm_series import overlay_tests, pins
from vllm_series.errors import CheckFailed
from vllm_series.ui import emit, json_option, workspace


@click.command("overlay-test")
@click.argument("lines", nargs=-1)
@click.option(
    "-k", "select", default="", metavar="EXPRESSION", help="Only our tests that match, as in pytest."
)
@json_option
@click.pass_context
def overlay_test_command(ctx: click.Context, lines: tuple[str, ...], select: str, as_json: bool) -> None:
    """Run tests/dsa in the patched trees of LINES (default: all), and compare test_envs.py with upstream."""
    ws = workspace(ctx)
    results = overlay_tests.run(ws, lines or tuple(pins.lines(ws)), select)
    rows = {
        result.line: {
            **{name: result.count(name) for name in ("passed", "skipped", "failed", "error")},
            "problems": result.problems,
        }
        for result in results
    }
    text = []
    for result in results:
        text.append(
            f"{result.line:10} {result.count('passed')} passed, {result.count('skipped')} skipped, "
            f"{len(result.problems)} problems"
        )
        text += [f"    {problem}" for problem in result.problems]
    failed = any(result.problems for result in results)
    emit({"ok": not failed, "lines": rows}, as_json=as_json, text="\n".join(text))
    if failed:
        raise CheckFailed(
            "the overlay's tests found problems (above)",
            fix="mend them; one line alone: series overlay-test LINE -k NAME",
        )


def register(group: click.Group) -> None:
    """Add the command to ``series``."""
    group.add_command(overlay_test_command)
