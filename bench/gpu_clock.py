# SPDX-License-Identifier: Apache-2.0
"""The card's clock and power while something runs, read by nvidia-smi in a process of its own."""

from __future__ import annotations

import datetime
import os
import statistics
import subprocess
import tempfile
import time
from typing import Any

#: Microseconds are cut off as nvidia-smi does.
_FORMAT = "%Y/%m/%d %H:%M:%S.%f"


def parse(text: str) -> list[tuple[float, float, float]]:
    """Samples of nvidia-smi's CSV: local time as seconds since the epoch, SM clock in MHz, power in W.

    Lines that are cut off, or hold "[N/A]", are left out.
    """
    samples = []
    for line in text.splitlines():
        fields = line.split(", ")
        try:
            at = datetime.datetime.strptime(fields[0], _FORMAT).timestamp()
            samples.append((at, float(fields[1]), float(fields[2])))
        except (ValueError, IndexError):
            continue
    return samples


class ClockLog:
    """Samples every ``milliseconds`` between entering and leaving; spans are asked for afterwards."""

    def __init__(self, milliseconds: int = 50) -> None:
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
        self.command = ["nvidia-smi", "--query-gpu=timestamp,clocks.sm,power.draw", "-i", card]
        self.command += ["--format=csv,noheader,nounits", f"--loop-ms={milliseconds}"]
        self.samples: list[tuple[float, float, float]] = []

    def __enter__(self) -> ClockLog:
        self._file = tempfile.TemporaryFile("w+")
        try:
            self._child: subprocess.Popen[str] | None = subprocess.Popen(self.command, stdout=self._file)
        except OSError:  # no nvidia-smi: no samples
            self._child = None
        return self

    def __exit__(self, *_: Any) -> None:
        if self._child is not None:
            time.sleep(0.2)
            self._child.terminate()
            self._child.wait()
        self._file.seek(0)
        self.samples = parse(self._file.read())
        self._file.close()

    def within(self, spans: list[tuple[float, float]]) -> tuple[float, float, int] | None:
        """Median clock and power of the samples in spans of `time.time`, and how many; None without any."""
        inside = [s for s in self.samples if any(start <= s[0] <= end for start, end in spans)]
        if not inside:
            return None
        clock, power = (statistics.median(s[i] for s in inside) for i in (1, 2))
        return clock, power, len(inside)
