# SPDX-License-Identifier: Apache-2.0
"""bench/run_info.py: what a row says of its run, whatever the machine has."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_info(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("run_info")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 580.1; echo 580.1", "580.1"),  # a machine with two cards
        ("echo 580.1", "580.1"),
        ("echo broken; exit 9", "unknown"),
        ("true", "unknown"),
    ],
)
def test_the_driver_is_one_version(
    run_info: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, expected: str
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert run_info.driver() == expected


def test_a_machine_without_nvidia_smi_or_git(
    run_info: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_info.driver() == "unknown"
    assert run_info.commit() == "unknown"
    assert run_info.facts("abc1234", "2.14.0")["commit"] == "abc1234"


def test_the_commit_is_the_checkouts(run_info: Any) -> None:
    head = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "HEAD"], text=True).strip()
    assert head.startswith(run_info.commit())
    assert run_info.facts(torch_version="2.14.0")["torch"] == "2.14.0"
