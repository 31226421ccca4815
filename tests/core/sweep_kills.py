"""Kills each command before every single change that it makes in the file system, and runs it again.

Not part of the test run: `pytest tests/core/sweep_kills.py` takes an hour. ``SWEEP_STRIDE=7`` tries each
seventh step, ``SWEEP_FIRST`` says where to begin. What it finds becomes a test in test_kill_steps.py.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from core_lab import Project
from kill_scenes import SCENES
from kills import Killer

STRIDE, FIRST = int(os.environ.get("SWEEP_STRIDE", "1")), int(os.environ.get("SWEEP_FIRST", "1"))


@pytest.fixture(scope="session")
def killer(tmp_path_factory: pytest.TempPathFactory) -> Killer:
    return Killer(tmp_path_factory.mktemp("killer"))


@pytest.mark.parametrize("name", sorted(SCENES))
def test_every_step(two: Project, killer: Killer, tmp_path: Path, name: str) -> None:
    scene = SCENES[name](two)
    saved = tmp_path / "saved"
    shutil.copytree(two.root, saved, symlinks=True)
    whole = killer.series(two.root, *scene.argv)
    assert whole.code == 0, whole.said
    scene.check()
    failed, number = [], FIRST
    while number <= len(whole.steps):
        shutil.rmtree(two.root)
        shutil.copytree(saved, two.root, symlinks=True)
        run = killer.series(two.root, *scene.argv, at=number)
        try:
            two.series(*scene.argv)
            scene.check()
        except AssertionError as err:
            failed.append(f"{number} {run.steps}: {err}")
            print(failed[-1], flush=True)
        number += STRIDE
    assert not failed, "\n".join(failed)
