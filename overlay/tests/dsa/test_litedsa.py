# SPDX-License-Identifier: Apache-2.0
"""LiteDSA without a GPU: the definition, the grouped algorithm, the plan and the FP8 cache rows."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from vllm.dsa.litedsa import check, fallback, kernel, plan, reference, selfcheck

from .litedsa_cases import SELECTIONS, overlapping, select

TIGHT = {"rtol": 1e-11, "atol": 1e-11}
DIM, V_DIM = 24, 16  # the algorithm does not depend on the widths


def inputs(tokens: int, heads: int, rows: int, seed: int, dim: int = DIM) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, heads, dim, generator=g, dtype=torch.float64),
        torch.randn(rows, dim, generator=g, dtype=torch.float64),
    )


def by_hand(q: list[float], rows: list[list[float]], scale: float, v_dim: int) -> tuple[list[float], float]:
    """Softmax attention of one head, with Python's own numbers."""
    scores = [scale * sum(x * y for x, y in zip(q, row, strict=True)) for row in rows]
    total = math.fsum(math.exp(s) for s in scores)
    out = [
        math.fsum(math.exp(s) * row[d] for s, row in zip(scores, rows, strict=True)) / total
        for d in range(v_dim)
    ]
    return out, math.log(total)


def test_the_definition_is_softmax_attention() -> None:
    q, kv = inputs(3, 2, 11, 0, dim=6)
    topk = torch.tensor([[4, -1, 0, 10], [7, -1, -1, -1], [3, 2, 1, 0]], dtype=torch.int32)
    out, lse = reference.attend(q, kv, topk, 0.7, v_dim=4)
    for t in range(3):
        rows = [kv[i].tolist() for i in topk[t].tolist() if i >= 0]
        for h in range(2):
            wanted, wanted_lse = by_hand(q[t, h].tolist(), rows, 0.7, 4)
            assert out[t, h].tolist() == pytest.approx(wanted, rel=1e-12)
            assert float(lse[t, h]) == pytest.approx(wanted_lse, rel=1e-12)


def test_a_query_without_keys_gives_zero_and_minus_infinity() -> None:
    q, kv = inputs(2, 8, 5, 1)
    topk = torch.tensor([[-1, -1], [3, -1]], dtype=torch.int32)
    for found in (
        reference.attend(q, kv, topk, 1.0, V_DIM),
        reference.attend_grouped(q, kv, topk, [0, 2], 1.0, V_DIM),
    ):
        assert bool((found[0][0] == 0).all()) and bool((found[1][0] == -torch.inf).all())
        torch.testing.assert_close(found[0][1], kv[3, :V_DIM].expand(8, -1))  # one key: its value


@pytest.mark.parametrize("heads", plan.HEADS)
@pytest.mark.parametrize("name", SELECTIONS)
def test_the_grouped_algorithm_is_the_definition(name: str, heads: int) -> None:
    group = plan.group_size(heads)
    for seed, tokens, k, tile in ((0, 2 * group + 3, 21, 64), (1, group, 16, 8), (2, 1, 5, 4)):
        rows = group * k + 7
        q, kv = inputs(tokens, heads, rows, seed)
        topk = select(name, tokens, k, rows, torch.Generator().manual_seed(seed), group)
        starts = plan.group_starts([0, tokens], heads)
        wanted = reference.attend(q, kv, topk, 0.3, V_DIM)
        found = reference.attend_grouped(q, kv, topk, starts, 0.3, V_DIM, tile=tile)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, **TIGHT)


def test_large_scores_do_not_overflow_and_late_ones_take_over() -> None:
    q, kv = inputs(8, 8, 300, 3)
    q, kv = q * 40, kv * torch.linspace(0.1, 30, 300, dtype=torch.float64)[:, None]
    topk = select("random", 8, 200, 300, torch.Generator().manual_seed(0))
    wanted = reference.attend(q, kv, topk, 1.0, V_DIM)
    found = reference.attend_grouped(q, kv, topk, [0, 8], 1.0, V_DIM, tile=16)
    assert float(wanted[1].max()) > 1000
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1], wanted[1], **TIGHT)


def test_a_sink_takes_weight_and_leaves_the_log_sum_exp() -> None:
    q, kv = inputs(5, 16, 40, 4)
    topk = select("short", 5, 9, 40, torch.Generator().manual_seed(1))
    topk[2] = -1
    sinks = torch.linspace(-2, 3, 16, dtype=torch.float64)
    plain = reference.attend(q, kv, topk, 0.5, V_DIM)
    wanted = reference.attend(q, kv, topk, 0.5, V_DIM, sinks)
    share = torch.sigmoid(plain[1] - sinks)  # exp(lse) / (exp(lse) + exp(sink))
    torch.testing.assert_close(wanted[0], plain[0] * share[..., None], **TIGHT)
    assert torch.equal(wanted[1], plain[1])
    found = reference.attend_grouped(q, kv, topk, [0, 4, 5], 0.5, V_DIM, sinks, tile=4)
    torch.testing.assert_close(found[0], wanted[0], **TIGHT)
    torch.testing.assert_close(found[1], wanted[1], **TIGHT)


def test_unions_are_sets_with_their_owners() -> None:
    topk = torch.tensor([[5, 2, -1], [2, 9, 7], [1, -1, -1]], dtype=torch.int32)
    first, second = reference.unions(topk, [0, 2, 3])
    assert first.keys.tolist() == [2, 5, 7, 9]
    assert first.mask.tolist() == [[True, True], [True, False], [False, True], [False, True]]
    assert second.keys.tolist() == [1] and second.mask.tolist() == [[True]]


def test_duplicates_are_refused() -> None:
    q, kv = inputs(2, 8, 10, 5)
    topk = torch.tensor([[1, 2, -1, -1], [4, 3, 7, 4]], dtype=torch.int32)
    for call in (
        lambda: reference.attend(q, kv, topk, 1.0, V_DIM),
        lambda: reference.attend_grouped(q, kv, topk, [0, 2], 1.0, V_DIM),
        lambda: reference.unions(topk, [0, 2]),
    ):
        with pytest.raises(ValueError, match="query 1 selects a key twice"):
            call()


@pytest.mark.parametrize("heads", plan.HEADS)
def test_groups_never_cross_a_bound_and_cover_everything(heads: int) -> None:
    rng = random.Random(heads)
    for _ in range(300):
        bounds = [rng.randint(0, 50)]
        for _ in range(rng.randint(0, 6)):
            bounds.append(bounds[-1] + rng.choice((0, 1, 2, 7, 8, 9, 64, 131)))
        starts = plan.group_starts(bounds, heads)
        tokens = [t for a, b in itertools.pairwise(starts) for t in range(a, b)]
        assert tokens == list(range(bounds[0], bounds[-1]))
        for a, b in itertools.pairwise(starts):
            assert 1 <= b - a <= plan.group_size(heads)
            assert not any(a < bound < b for bound in bounds)


@pytest.mark.parametrize("heads", plan.HEADS)
def test_the_last_round_has_smaller_groups(heads: int) -> None:
    size, wave = plan.group_size(heads), 12
    for tokens in range(1, 40 * size):
        bounds = [5, 5 + tokens // 3, 5 + tokens]
        whole, cut = plan.group_starts(bounds, heads), plan.group_starts(bounds, heads, wave)
        rounds, left = divmod(len(whole) - 1, wave)
        assert cut[: rounds * wave + 1] == whole[: rounds * wave + 1]  # the full rounds stay
        assert rounds * wave + left <= len(cut) - 1 <= (rounds + (left > 0)) * wave
        assert cut[-1] == bounds[-1] and set(bounds) <= {*cut}
        sizes = [b - a for a, b in itertools.pairwise(cut)]
        assert min(sizes) >= 1 and max(sizes) <= size
        last = sizes[rounds * wave :]
        if left * size <= wave:
            assert set(last) <= {1}  # there is room for every query alone
        elif left * 2 <= wave:
            assert max(last) <= size // 2
        elif cut != whole:
            assert max(last) <= size // 2 and len(last) <= wave


@pytest.mark.parametrize("bounds", [[], [3, 2], [0, 5, 4]])
def test_bounds_that_descend_are_an_error(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="must ascend"):
        plan.group_starts(bounds, 8)


def test_what_is_supported() -> None:
    assert not any(plan.unsupported(h, 576, 512, k) for h in plan.HEADS for k in (1, 512, 1008, 2048))
    assert "64 query heads" in plan.unsupported(64, 576, 512, 2048)
    assert "512 and 512" in plan.unsupported(16, 512, 512, 2048)
    assert "2176" in plan.unsupported(16, 576, 512, 2176)


@pytest.mark.parametrize("heads", plan.HEADS)
@pytest.mark.parametrize("k", [1, 63, 1008, 2048])
def test_no_union_overflows_its_buffers(heads: int, k: int) -> None:
    sizes = plan.sizes(3, heads, k)
    assert sizes.slots[1] >= plan.group_size(heads) * k
    assert sizes.slots[1] == 64 * sizes.masks[1] and sizes.masks[2] * heads == 64
    assert sizes.bytes == 4 * 3 * sizes.slots[1] * (1 + 2 * sizes.masks[2] / 64) + 12


def test_spans() -> None:
    assert [plan.span_of(n) for n in (0, 1, 128, 129, 1 << 20)] == [128, 128, 128, 256, 1 << 20]


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 4.0, 8.0])
def test_the_overlap_is_what_was_asked_for(ratio: float) -> None:
    topk = overlapping(19, 32, 400, ratio, 8, torch.Generator().manual_seed(0))
    reference.refuse_duplicates(topk)
    counts = [u.keys.numel() for u in reference.unions(topk, plan.group_starts([0, 19], 8))]
    assert counts[:2] == [round(32 * ratio)] * 2


def test_fp8_rows_unpack_to_what_was_packed() -> None:
    g = torch.Generator().manual_seed(6)
    kv = torch.randn(9, 576, generator=g) * torch.logspace(-3, 3, 9)[:, None]
    kv[4, :128] = 0
    cache = reference.pack_fp8(kv)
    assert cache.shape == (9, plan.FP8_ROW_BYTES) and cache.dtype == torch.uint8
    found = reference.unpack_fp8(cache)
    assert torch.equal(found[:, 512:], kv[:, 512:].to(torch.bfloat16))
    # e4m3 keeps 3 bits behind the point, so a relative error of 1/16; below that, half a step of the block.
    limit = (
        kv[:, :512].abs() / 16 + kv[:, :512].reshape(9, 4, 128).abs().amax(2).repeat_interleave(128, 1) * 2e-5
    )
    assert bool(((found[:, :512].float() - kv[:, :512]).abs() <= limit * 1.05).all())
    # The layout, byte by byte: block 2 of row 3.
    row, scale = cache[3], cache[3, 512 + 8 : 512 + 12].view(torch.float32)
    value = row[300:301].view(torch.float8_e4m3fn).float() * scale
    assert torch.equal(found[3, 300:301], value.to(torch.bfloat16))


def test_buffers_of_a_launch_are_bounded() -> None:
    for heads in plan.HEADS:
        for k in (1, 512, 2048):
            groups = plan.groups_at_once(heads, k)
            assert groups % 132 == 0 and groups > 0
            assert plan.sizes(groups, heads, k).bytes <= plan.BUFFER_BYTES
        assert plan.groups_at_once(heads, 2048) * plan.group_size(heads) >= 16384  # one pair of launches


@pytest.mark.parametrize(("heads", "fp8"), [(8, False), (16, True), (32, False)])
def test_the_op_on_the_cpu_is_the_grouped_algorithm(heads: int, fp8: bool) -> None:
    """Its table, -1 and positions out of range, and tokens that belong to no group."""
    q_nope, q_rope, kv, topk, _, starts, rows = selfcheck.case(heads, 20, fp8, 1, "cpu")
    assert rows.requests is not None and rows.table is not None
    span, first = plan.span_of(2 * 20 + 200), starts[1]
    topk[first, 0], topk[first, 1] = span, span + 1000
    out = torch.full((*q_nope.shape[:2], 512), 7.0, dtype=torch.bfloat16)
    lse = torch.full(q_nope.shape[:2], 7.0)
    start = torch.tensor(starts[1:], dtype=torch.int32)
    counts = torch.full((len(starts) - 2,), -7, dtype=torch.int32)
    kernel.litedsa(q_nope, q_rope, kv, topk, start, span, 0.05, out, lse, rows, counts)
    inside = torch.where(topk < span, topk, -1)
    assert counts.tolist() == [u.keys.numel() for u in reference.unions(inside, starts[1:])]
    assert bool((out[:first] == 7).all()) and bool((lse[:first] == 7).all())
    cache = reference.unpack_fp8(kv) if fp8 else kv
    selected = torch.full(topk.shape, -1)
    for t in range(topk.shape[0]):
        for i, position in enumerate(topk[t].tolist()):
            if 0 <= position < span:
                block = int(rows.table[int(rows.requests[t]), position // 64])
                selected[t, i] = block * 64 + position % 64
    bounds = [s - first for s in starts[1:]]
    q = torch.cat([q_nope, q_rope], 2)
    wanted = reference.attend_grouped(q[first:], cache, selected[first:], bounds, 0.05)
    torch.testing.assert_close(out[first:].double(), wanted[0], rtol=5e-3, atol=1e-3)
    torch.testing.assert_close(lse[first:].double(), wanted[1], rtol=1e-6, atol=1e-6)


def test_a_cache_with_gaps_between_blocks() -> None:
    topk = torch.tensor([[0, 63, 64, -1, 127, 128]], dtype=torch.int32)
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    found = fallback.cache_rows(topk, None, table, 64, 100, 256, 1000)
    assert found.tolist() == [[300, 363, 100, -1, 163, -1]]
    assert fallback.cache_rows(topk, None, None, 1, 1, 128, 64).tolist() == [[0, 63, -1, -1, -1, -1]]


def test_the_self_check_finds_wrong_unions() -> None:
    _, _, _, topk, _, starts, rows = selfcheck.case(16, 30, False, 2, "cpu")
    assert rows.requests is not None and rows.table is not None
    unions = kernel.Unions.empty(len(starts) - 1, 16, 30, "cpu")
    unions.masks.zero_()
    for g, union in enumerate(reference.unions(topk, starts)):
        n = union.keys.numel()
        unions.counts[g] = n
        unions.slots[g] = -1
        blocks = rows.table[int(rows.requests[starts[g]])].long()
        unions.slots[g, :n] = (blocks[union.keys // 64] * 64 + union.keys % 64).int()
        for e, query in union.mask.nonzero().tolist():
            bit = 1 << e % 64
            unions.masks[g, e // 64, query] |= bit - (1 << 64) if bit >> 63 else bit
    assert selfcheck.check_unions(unions, topk, starts, rows) == ""
    unions.masks[1, 0, 2] ^= 2
    assert selfcheck.check_unions(unions, topk, starts, rows) == "group 1: other masks"
    unions.slots[0, 5] += 1
    assert selfcheck.check_unions(unions, topk, starts, rows) == "group 0: other cache rows"
    unions.counts[0] = -1
    assert "has -1 entries" in selfcheck.check_unions(unions, topk, starts, rows)


def arguments() -> dict[str, Any]:
    bf16 = torch.bfloat16
    return {
        "q_nope": torch.zeros(9, 16, 512, dtype=bf16),
        "q_rope": torch.zeros(9, 16, 64, dtype=bf16),
        "kv": torch.zeros(50, 576, dtype=bf16),
        "starts": torch.tensor([0, 4, 8, 9], dtype=torch.int32),
        "unions": kernel.Unions.empty(3, 16, 32, "cpu"),
        "scale": 0.1,
        "out": torch.zeros(9, 16, 512, dtype=bf16),
        "lse": torch.zeros(9, 16),
        "ranges": None,
        "sinks": None,
    }


def test_good_arguments_pass() -> None:
    good = arguments()
    check.attend(**good)
    wide = torch.zeros(9, 16, 576, dtype=torch.bfloat16)
    check.attend(**{**good, "q_nope": wide[..., :512], "q_rope": wide[..., 512:]})
    check.attend(**{**good, "kv": torch.zeros(50, 656, dtype=torch.uint8), "lse": None})
    short = {"q_rope": None, "kv": torch.zeros(50, 512, dtype=torch.bfloat16), "sinks": torch.zeros(16)}
    check.attend(**{**good, **short})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("q_nope", torch.zeros(9, 64, 512, dtype=torch.bfloat16), "64 query heads"),
        ("q_nope", torch.zeros(9, 16, 512), "q_nope is torch.float32"),
        ("q_rope", torch.zeros(9, 16, 32, dtype=torch.bfloat16), "q_rope"),
        ("q_rope", torch.zeros(9, 16, 68, dtype=torch.bfloat16)[..., :64], "q_rope must start"),
        ("kv", torch.zeros(50, 512, dtype=torch.bfloat16), "kv is"),
        ("kv", torch.zeros(50, 584, dtype=torch.uint8), "656"),
        ("kv", torch.zeros(50, 1152, dtype=torch.bfloat16)[:, ::2], "stride 2"),
        ("out", torch.zeros(8, 16, 512, dtype=torch.bfloat16), "out is"),
        ("lse", torch.zeros(9, 16, dtype=torch.float64), "lse is"),
        ("scale", 0.0, "positive"),
        ("unions", kernel.Unions.empty(2, 16, 32, "cpu"), "slots is"),
        ("ranges", torch.zeros(9, 2, dtype=torch.int32), "ranges is"),
        ("sinks", torch.zeros(8), "sinks is"),
    ],
)
def test_wrong_arguments_are_named(name: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match="litedsa: ") as found:
        check.attend(**{**arguments(), name: value})
    assert says in str(found.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"topk": torch.zeros(9, 32, dtype=torch.int64)}, "topk is torch.int64"),
        ({"topk": torch.zeros(9, 4096, dtype=torch.int32)}, "top-k of 4096"),
        ({"span": 100}, "span of 100"),
        ({"span": 1 << 21}, "span of"),
        ({"rows": kernel.Rows(requests=torch.zeros(9, dtype=torch.int32))}, "and a table"),
        ({"rows": kernel.Rows(table=torch.zeros(1, 4, dtype=torch.int32), block_size=64)}, "blocks of 64"),
        ({"out": kernel.Unions.empty(3, 8, 32, "cpu")}, "slots is"),
    ],
)
def test_wrong_arguments_of_a_union_are_named(change: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {
        "topk": torch.zeros(9, 32, dtype=torch.int32),
        "starts": torch.tensor([0, 4, 8, 9], dtype=torch.int32),
        "heads": 16,
        "span": 256,
        "rows": kernel.Rows(),
        "out": kernel.Unions.empty(3, 16, 32, "cpu"),
    }
    check.unions(**good)
    with pytest.raises(ValueError, match="litedsa: ") as found:
        check.unions(**{**good, **change})
    assert says in str(found.value)


def test_other_cards_and_layers_have_a_reason() -> None:
    assert "9.0" in kernel.why_not(16, 576, 512, 2048, (10, 0))
    assert "128 query heads" in kernel.why_not(128, 576, 512, 2048, (9, 0))
