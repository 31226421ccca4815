# SPDX-License-Identifier: Apache-2.0
"""The card's clock, power and limits while something runs, read by nvidia-smi in a process of its own."""

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

_QUERY = "timestamp,clocks.sm,power.draw,clocks_event_reasons.active"

#: Bits of ``clocks_event_reasons.active``, as NVML numbers them: why the clock is below what it could be.
_REASONS = {"power cap": 0x4 | 0x80, "temperature": 0x20 | 0x40}


def parse(text: str) -> list[tuple[float, float, float, int]]:
    """Samples of nvidia-smi's CSV: seconds since the epoch, SM clock in MHz, power in W, reasons.

    Lines that are cut off, or hold "[N/A]", are left out.
    """
    samples = []
    for line in text.splitlines():
        fields = line.split(", ")
        try:
            at = datetime.datetime.strptime(fields[0], _FORMAT).timestamp()
            samples.append((at, float(fields[1]), float(fields[2]), int(fields[3], 16)))
        except (ValueError, IndexError):
            continue
    return samples


class ClockLog:
    """Samples every ``milliseconds`` between entering and leaving; spans are asked for afterwards."""

    def __init__(self, milliseconds: int = 50) -> None:
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
        self.command = ["nvidia-smi", f"--query-gpu={_QUERY}", "-i", card]
        self.command += ["--format=csv,noheader,nounits", f"--loop-ms={milliseconds}"]
        self.samples: list[tuple[float, float, float, int]] = []

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

    def within(self, spans: list[tuple[float, float]]) -> dict[str, float] | None:
        """What the samples in spans of `time.time` say; None without any.

        Returns:
            ``clock`` (MHz) and ``power`` (W), both medians, ``samples`` (their number), and the shares of the
            samples in which the ``power cap`` or the ``temperature`` held the clock down.
        """
        inside = [s for s in self.samples if any(start <= s[0] <= end for start, end in spans)]
        if not inside:
            return None
        held = {why: statistics.fmean(bool(s[3] & bits) for s in inside) for why, bits in _REASONS.items()}
        clock, power = (statistics.median(s[i] for s in inside) for i in (1, 2))
        return {"clock": clock, "power": power, "samples": len(inside)} | held
