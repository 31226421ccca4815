# SPDX-License-Identifier: Apache-2.0
"""What ``auto`` knows. Written by ``bench/overlap_table.py --write`` from bench/results; do not edit."""

from __future__ import annotations

from vllm.dsa.overlap.auto import Entry

#: GPU time of decode graphs, compared with off at several contexts.
MEASURED: tuple[Entry, ...] = (
    Entry(
        "0.28.0",
        "h200",
        8,
        32,
        "FULL",
        (
            (1, "full"),
            (4, "full"),
            (16, "full"),
            (32, "full"),
            (64, "full"),
            (256, "full"),
            (512, "off"),
        ),
    ),
    Entry(
        "0.28.0",
        "h200",
        16,
        64,
        "FULL",
        (
            (1, "full"),
            (4, "full"),
            (16, "full"),
            (32, "full"),
            (64, "full"),
            (256, "off"),
            (512, "off"),
        ),
    ),
    Entry(
        "0.33.0",
        "h200",
        8,
        32,
        "FULL",
        (
            (1, "full"),
            (4, "full"),
            (16, "full"),
            (32, "full"),
            (64, "full"),
        ),
    ),
    Entry(
        "0.33.0",
        "h200",
        8,
        32,
        "FULL",
        (
            (1, "full"),
            (4, "full"),
            (16, "full"),
            (32, "full"),
            (64, "full"),
        ),
        "fp8",
    ),
    Entry(
        "0.33.0",
        "h200",
        16,
        64,
        "FULL",
        (
            (1, "full"),
            (4, "full"),
            (16, "full"),
            (32, "full"),
            (64, "full"),
        ),
    ),
    Entry(
        "0.33.0",
        "h200",
        16,
        64,
        "FULL",
        (
            (1, "full"),
            (4, "full"),
            (16, "full"),
            (32, "full"),
            (64, "full"),
        ),
        "fp8",
    ),
)
