"""A patch that breaks upstream's code is caught on the real tree: exit 7, and the node is named."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from vllm_series import apply, lock, pins, stack
from vllm_series.baseline.diff import Kind
from vllm_series.baseline.engine import Limits
from vllm_series.baseline.session import Options, Session
from vllm_series.cli import cli, main
from vllm_series.importer import import_pin, odb, scratch
from vllm_series.workspace import Workspace

ROOT = Path(__file__).parents[2]
TARGET = "vllm/v1/attention/backends/mla/indexer.py"
TEST = "tests/v1/attention/test_indexer_dcp_localize.py"


def plant(ws: Workspace, line: str, old: str, new: str) -> None:
    """Append a patch that replaces ``old`` by ``new`` in TARGET to the line's series."""
    pin = pins.load_pin(ws, line)
    import_pin(ws, pin)
    made = stack.current(ws, pin)
    with scratch(odb(ws), ws, made.top, "plant", [TARGET]) as git:
        path = git.cwd / TARGET
        text = path.read_text()
        assert text.count(old) >= 1, "upstream moved: pick another place to break"
        path.write_text(text.replace(old, new))
        git.run("add", TARGET)
        git.run("commit", "-q", "-m", "planted: break the indexer\n\nFeature: planted\n")
        mail = git.raw("format-patch", "--stdout", "--zero-commit", "--full-index", "--no-signature", "-1", "-N")
    (ws.patches(line) / "planted.patch").write_bytes(mail)
    series = ws.patches(line) / "series"
    series.write_text(series.read_text() + "planted.patch\n")
    with apply.line_lock(ws, line):
        lock.write(ws, lock.lock_of(ws, stack.current(ws, pin)))


@pytest.fixture
def checkout(tmp_path: Path) -> Workspace:
    """A copy of this checkout's pins, patches and overlay with an object store of its own."""
    for name in ("pins", "patches", "overlay", "bench"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return Workspace(tmp_path)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(900)
def test_planted_regression_is_caught(checkout: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    plant(checkout, "0.33.0", "def ", "def ")
