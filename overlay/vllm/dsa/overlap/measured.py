# SPDX-License-Identifier: Apache-2.0
"""What ``auto`` knows. Written by ``bench/overlap_table.py --write`` from bench/results; do not edit."""

from __future__ import annotations

from vllm.dsa.overlap.auto import Entry

#: Nothing is measured yet, so ``auto`` acts as ``off`` on every card.
MEASURED: tuple[Entry, ...] = ()
