# SPDX-License-Identifier: Apache-2.0
"""What a stored row says of the run it comes from."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def driver() -> str:
    """Return the driver's version, 'unknown' where nvidia-smi is missing or fails.

    nvidia-smi prints one line per card; they are alike, for a machine has one driver.
    """
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip().split("\n")[0].strip() or "unknown" if done.returncode == 0 else "unknown"


def commit(given: str = "") -> str:
    """Return ``given``, else the checkout's commit, 'unknown' where git cannot tell it."""
    if given:
        return given
    head = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def facts(given_commit: str = "", torch_version: str = "") -> dict[str, Any]:
    """Return commit, driver, torch and date; the version of this process's torch unless one is given."""
    if not torch_version:
        import torch

        torch_version = torch.__version__
    return {
        "commit": commit(given_commit),
        "driver": driver(),
        "torch": torch_version,
        "date": datetime.date.today().isoformat(),
    }
