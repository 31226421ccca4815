"""The static checks are listed once, in .pre-commit-config.yaml, and clone nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml


@pytest.fixture(scope="module")
def hooks(root: Path) -> dict[str, dict]:
    config = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    return {hook["id"]: hook for hook in config["repos"][0]["hooks"]}


def test_each_tool_is_of_the_lock_file(root: Path, hooks: dict[str, dict]) -> None:
    bin_folder = root / ".venv" / "bin"
    for name, hook in hooks.items():
        start, tool = hook["entry"].split()[:2]
        assert start == "scripts/lib/run.sh", name
        assert (bin_folder / tool).exists(), f"{tool} is in no dependency of pyproject.toml"


def test_the_lint_stage_has_no_list_of_its_own(root: Path, hooks: dict[str, dict]) -> None:
    text = (root / "scripts/test.sh").read_text()
    body = re.search(r"^run_lint\(\) \{(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    assert body and "options=(--all-files" in body[1] and "pre-commit run" in body[1]
    assert not {hook["entry"].split()[1] for hook in hooks.values()} & set(body[1].split())


def test_hooks_catch_what_they_are_for(root: Path, tmp_path: Path) -> None:
    """shellcheck, shfmt, clang-format, hadolint and the Buildkite schema, each on a file with one fault."""
    bin_folder = root / ".venv" / "bin"
    (tmp_path / "a.sh").write_text('#!/bin/bash\nif [ $1 = x ]; then\n  echo "y"\nfi\n')
    (tmp_path / "a.cu").write_text("int  f( ) { return 1; }\n")
    shutil.copy(root / ".clang-format", tmp_path)
    (tmp_path / "a.yml").write_text("steps:\n  - command: x\n    parallelism: many\n")
    (tmp_path / "Containerfile").write_text("FROM docker.io/library/debian\n")
    commands = {
        "DL3006": ["hadolint", "Containerfile"],
        "SC2086": ["shellcheck", "a.sh"],
        "    echo": ["shfmt", "-i", "4", "-ci", "-d", "a.sh"],
        "code should be clang-formatted": ["clang-format", "--dry-run", "--Werror", "a.cu"],
        "parallelism": ["check-jsonschema", "--builtin-schema", "vendor.buildkite", "a.yml"],
    }
    for expected, (tool, *arguments) in commands.items():
        done = subprocess.run(
            [str(bin_folder / tool), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0, tool
        assert expected in done.stdout + done.stderr, tool
