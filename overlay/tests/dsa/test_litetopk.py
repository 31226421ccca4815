# SPDX-License-Identifier: Apache-2.0
"""LiteTopK without a GPU: the meaning of the reference, and the plan."""

import math
import random

import pytest
import torch
from vllm.dsa.litetopk import dispatch, kernel, plan, reference


def by_hand(scores: list[float], ks: int, ke: int, k: int) -> list[int]:
    """The definition, with Python's own sort."""
    columns = range(ks, ke)
    if len(columns) > k:

        def rank(j: int) -> tuple[float, int]:
            score = -math.inf if math.isnan(scores[j]) else scores[j]
            return (-score, j)

        columns = sorted(columns, key=rank)[:k]
    return [j - ks for j in columns] + [-1] * (k - len(columns))


@pytest.mark.parametrize("k", [1, 3, 8, 40])
def test_reference_is_what_sorting_says(k: int) -> None:
    rng = random.Random(k)
    values = [0.0, -0.0, 1.0, -1.0, 2.5, math.inf, -math.inf, math.nan]
    rows, columns = 60, 33
    scores = [[rng.choice(values) for _ in range(columns)] for _ in range(rows)]
    ks = [rng.randint(0, columns) for _ in range(rows)]
    ke = [rng.randint(start, columns) for start in ks]
    found = reference.top_positions(
        torch.tensor(scores), torch.tensor(ks, dtype=torch.int32), torch.tensor(ke, dtype=torch.int32), k
    )
    assert found.dtype == torch.int32
    assert found.tolist() == [by_hand(*row, k) for row in zip(scores, ks, ke, strict=True)]


def test_scores_are_the_formula() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(3, 32, 128).to(torch.float8_e4m3fn), torch.randn(7, 128).to(torch.float8_e4m3fn)
    scale, weights = torch.rand(7), torch.randn(3, 32)
    scores = reference.indexer_scores(q, k, scale, weights)
    for i in range(3):
        for j in range(7):
            total = sum(
                float(weights[i, h]) * max(0.0, float(q[i, h].double() @ k[j].double())) for h in range(32)
            )
            assert float(scores[i, j]) == pytest.approx(total * float(scale[j]), rel=1e-12)


@pytest.mark.parametrize("heads", plan.HEADS)
@pytest.mark.parametrize("multiprocessors", [132, 114, 78])
def test_every_plan_is_valid_and_bounded(heads: int, multiprocessors: int) -> None:
    rng = random.Random(heads)
    for _ in range(3000):
        queries, keys = int(2 ** rng.uniform(0, 17)), int(2 ** rng.uniform(0, 20))
        k = rng.choice(plan.TESTED_K)
        found = plan.plan(queries, keys, heads, k, multiprocessors)
        blocks = -(-queries // (256 // heads))
        assert 0 <= found.whole <= blocks and 1 <= found.splits <= 128
        assert found.whole + (blocks - found.whole) * found.splits >= blocks
        # What dsa_litetopk demands.
        assert found.segment % 2 == 0 and found.segment >= 32 * found.check_tiles
        assert k <= 64 * found.fill_tiles
        assert found.workspace <= plan.most_workspace(heads, k, multiprocessors) <= 256 << 20


def test_few_queries_are_cut_and_full_waves_are_not() -> None:
    assert plan.plan(8, 1 << 20, 64, 2048, 132).splits > 30
    assert plan.plan(8, 4000, 64, 2048, 132).splits == 1
    # One worker for each multiprocessor, or all three: a few more would share theirs with others.
    assert 7 / 8 * 132 < 64 / 8 * plan.plan(64, 1 << 15, 32, 2048, 132).splits <= 132
    assert 7 / 8 * 396 < 64 / 4 * plan.plan(64, 1 << 17, 64, 2048, 132).splits <= 396
    full = plan.plan(4 * 396 * 5, 1 << 20, 64, 2048, 132)
    assert full.splits == 1 and full.whole == 396 * 5
    tail = plan.plan(4 * 396 * 5 + 8, 1 << 20, 64, 2048, 132)
    assert tail.whole == 396 * 5 and tail.splits > 30


@pytest.mark.parametrize(
    ("heads", "dim", "k", "words"),
    [
        (16, 128, 2048, "16 index heads"),
        (64, 64, 2048, "dimension 64"),
        (64, 128, 4096, "4096"),
        (32, 128, 7, "even"),
    ],
)
def test_unsupported_indexers_are_named(heads: int, dim: int, k: int, words: str) -> None:
    assert words in plan.unsupported(heads, dim, k)
    assert words in kernel.why_not(heads, dim, k, (9, 0))


def test_supported_indexers() -> None:
    assert not any(plan.unsupported(heads, 128, k) for heads in (32, 64) for k in plan.TESTED_K)
    assert "9.0" in kernel.why_not(64, 128, 2048, (10, 0))


@pytest.mark.parametrize("sizes", [(0, 5, 64), (5, 0, 64), (5, 5, 48)])
def test_a_plan_of_nothing_is_an_error(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot plan"):
        plan.plan(*sizes, 2048, 132)


def test_worthwhile_is_what_was_measured() -> None:
    yes = dispatch.worthwhile
    assert yes(8, 1 << 15) and not yes(8, (1 << 15) - 1)
    assert yes(512, 1 << 18) and not yes(512, 1 << 17)
    assert yes(4096, 1 << 17) and not yes(4096, 1 << 16)
    assert yes(8192, 1 << 16) and not yes(8192, 1 << 15)
    assert yes(8000, 1 << 16) and not yes(7000, 1 << 16)  # a full chunk beside some decodes
