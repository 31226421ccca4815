"""One Markdown text from what the steps of a build left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def download(name: str) -> str:
    """The command that fetches an artifact of this build; outside of a job it needs a token."""
    build = os.environ.get("BUILDKITE_BUILD_ID", "")
    return f"buildkite-agent artifact download {name} ." + (f" --build {build}" if build else "")


def again(line: str, name: str) -> str:
    """The command that makes a refreshed patch where there is no agent, and applies it."""
    return f"scripts/lib/run.sh series ci refresh {line} && git apply {name}"


def markdown(build: Path) -> str:
    """Return the text: patches to refresh, upstream diffs, GPU suites and canary, as far as they are there.

    Args:
        build: folder that holds ``refresh/``, ``baseline/reports/``, ``gpu-results/`` and ``canary/``.
    """
    parts = []
    for path in sorted((build / "refresh").glob("*.patch")):
        name = f"build/refresh/{path.name}"
        parts.append(
            f"#### patches of {path.stem} need a refresh\n\n"
            f"    {download(name)} && git apply {name}\n\n"
            f"or, in a checkout of this commit:\n\n    {again(path.stem, name)}\n"
        )
    parts += [path.read_text(encoding="utf-8") for path in sorted(build.glob("baseline/reports/**/*.md"))]
    for path in sorted((build / "gpu-results").glob("**/gpu-suite/*.json")):
        try:
            parts.append(_gpu(json.loads(path.read_text(encoding="utf-8"))))
        except (ValueError, KeyError, TypeError) as error:  # of a job that was killed while it wrote
            parts.append(
                f"#### {path.relative_to(build)} cannot be read\n\n{type(error).__name__}: {error}\n"
            )
    parts += [path.read_text(encoding="utf-8") for path in sorted((build / "canary").glob("*.md"))]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts) or "Nothing to report.\n"


def _gpu(data: dict[str, Any]) -> str:
    text = [
        f"#### GPU suite {data['line']}, {data['card']}",
        "",
        "| step | state | s | why |",
        "|---|---|---|---|",
    ]
    for row in data["rows"]:
        text.append(f"| {row['case']} | {row['state']} | {row['seconds']:.0f} | {row['reason']} |")
    return "\n".join(text) + "\n"
