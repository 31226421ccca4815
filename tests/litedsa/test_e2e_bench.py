"""bench/litedsa_e2e.py, as far as it runs without an engine or torch."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.parametrize("first", [2048, 4095, 4096, 5000, 131071])
@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 8.0])
def test_a_pool_is_distinct_positions_of_the_past(
    first: int, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    e2e = importlib.import_module("litedsa_e2e")
    size, a, b, m = e2e.pool(first, ratio, first)
    positions = {(a + b * i) % m for i in range(size)}
    assert len(positions) == size and max(positions) <= first
    assert size == round(ratio * e2e.K) or size == m  # all that the past holds
    assert e2e.pool(first, ratio, first + 1)[1:3] != (a, b)
