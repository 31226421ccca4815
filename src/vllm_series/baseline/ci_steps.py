"""Upstream's own CI jobs (``.buildkite/test_areas/*.yaml``) that a change of given files would start."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vllm_series.errors import CheckFailed

AREAS = ".buildkite/test_areas"


@dataclass(frozen=True)
class Step:
    """One job: where it runs, which of the changed files start it, what it runs."""

    area: str
    label: str
    device: str
    gpus: int
    because: tuple[str, ...]
    commands: tuple[str, ...]
    tests: tuple[str, ...]  # files and folders under tests/


def _steps(tree: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((tree / AREAS).glob("*.yaml")):
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise CheckFailed(
                f"{AREAS}/{path.name} is not valid YAML: {error}", fix="check the pin's source"
            ) from None
        for step in (data or {}).get("steps", []):
            if isinstance(step, dict) and step.get("commands"):
                yield path.stem, step


def named_tests(commands: Iterable[str], tree: Path) -> list[str]:
    """Return the paths under ``tests/`` that the pytest calls in ``commands`` name."""
    found: list[str] = []
    for command in commands:
        for part in re.split(r"&&|\|\||;|\n", command):
            if "pytest" not in part:
                continue
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                words = part.split()
            for word in words:
                name = word.partition("::")[0].strip("/")
                for candidate in (f"tests/{name}", name):
                    if name and candidate.startswith("tests/") and (tree / candidate).exists():
                        found.append(candidate)
                        break
    return sorted(set(found))


def matching(tree: Path, touched: Iterable[str]) -> list[Step]:
    """Return the jobs whose ``source_file_dependencies`` cover one of the ``touched`` files."""
    changed = sorted(touched)
    found = []
    for area, step in _steps(tree):
        rules = [str(rule) for rule in step.get("source_file_dependencies") or []]
        because = tuple(sorted({name for name in changed for rule in rules if name.startswith(rule)}))
        if not because:
            continue
        commands = tuple(str(command) for command in step["commands"])
        found.append(
            Step(
                area=area,
                label=str(step.get("label", "")),
                device=str(step.get("device") or step.get("gpu") or "gpu"),
                gpus=int(step.get("num_devices") or step.get("num_gpus") or 1),
                because=because,
                commands=commands,
                tests=tuple(named_tests(commands, tree)),
            )
        )
    return found
