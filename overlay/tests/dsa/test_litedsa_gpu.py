# SPDX-License-Identifier: Apache-2.0
"""The LiteDSA kernels against the float64 reference, and no worse than upstream's kernel on the same inputs.

Ordered from the smallest part to the whole: with `-x` the first failure is the one to look at.
"""

import math
import random

import pytest
import torch
from vllm.dsa.litedsa import fallback, kernel, plan, reference, selfcheck

from .litedsa_cases import SELECTIONS, overlapping, select


def gpu_reason() -> str:
    """Why the kernels cannot run here, '' if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return kernel.why_not(16, 576, 512, 2048, torch.cuda.get_device_capability())


pytestmark = pytest.mark.skipif(bool(gpu_reason()), reason=f"kernel cannot run: {gpu_reason()}")

POISON = 13.0
SCALE = 192**-0.5


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(tokens: int, heads: int, rows: int, seed: int, fp8: bool = False) -> tuple[torch.Tensor, ...]:
    """``q_nope, q_rope, kv`` on the GPU."""
    g = generator(seed)
    q = (torch.randn(tokens, heads, 576, generator=g) * 2).to(torch.bfloat16).cuda()
    kv = torch.randn(rows, 576, generator=g).to(torch.bfloat16).cuda()
    return q[..., :512], q[..., 512:], reference.pack_fp8(kv) if fp8 else kv


def run(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    topk: torch.Tensor,
    starts: list[int],
    rows: kernel.Rows | None = None,
    span: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' result in poisoned buffers, with canaries around the tokens."""
    tokens, heads = q_nope.shape[:2]
    buffer = torch.full((tokens + 2, heads + 1, 512), POISON, dtype=torch.bfloat16, device="cuda")
    sums = torch.full((tokens + 2, heads + 1), POISON, device="cuda")
    out, lse = buffer[1:-1, :heads], sums[1:-1, :heads]
    start = torch.tensor(starts, dtype=torch.int32, device="cuda")
    kernel.litedsa(q_nope, q_rope, kv, topk, start, span or plan.span_of(kv.shape[0]), SCALE, out, lse, rows)
    torch.cuda.synchronize()
    inside = torch.zeros(tokens + 2, heads + 1, dtype=torch.bool, device="cuda")
    inside[1 + starts[0] : 1 + starts[-1], :heads] = True
    assert bool((buffer[~inside] == POISON).all()) and bool((sums[~inside] == POISON).all())
    return out[starts[0] : starts[-1]], lse[starts[0] : starts[-1]]


def errors(
    found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]
) -> tuple[float, float]:
    """Largest relative error of an output row and of a log-sum-exp; rows without keys must be exact."""
    out, lse = found[0].cpu().double(), found[1].cpu().double()
    value, total = wanted[0].cpu(), wanted[1].cpu()
    empty = torch.isneginf(total)
    assert bool((torch.isneginf(lse) == empty).all()) and bool((out[empty] == 0).all())
    if bool(empty.all()):
        return 0.0, 0.0
    off = (out - value).norm(dim=2) / value.norm(dim=2).clamp(min=1e-30)
    off_lse = (lse - total).abs() / total.abs().clamp(min=1)
    worst, worst_lse = float(off[~empty].max()), float(off_lse[~empty].max())
    assert not math.isnan(worst) and not math.isnan(worst_lse)
    return worst, worst_lse


def assert_close(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    topk: torch.Tensor,
    starts: list[int],
    what: object = "",
) -> None:
    found = run(q_nope, q_rope, kv, topk.cuda(), starts)
    cache = reference.unpack_fp8(kv) if kv.shape[1] == plan.FP8_ROW_BYTES else kv
    tokens = slice(starts[0], starts[-1])
    q = torch.cat([q_nope, q_rope], 2)[tokens]
    wanted = reference.attend(q, cache, topk[tokens].cuda(), SCALE)
    error, error_lse = errors(found, wanted)
    assert error <= selfcheck.TOLERANCE, f"output {error:.1e} {what}"
    assert error_lse <= selfcheck.TOLERANCE_LSE, f"log-sum-exp {error_lse:.1e} {what}"


@pytest.mark.parametrize("heads", plan.HEADS)
@pytest.mark.parametrize("name", SELECTIONS)
def test_unions(name: str, heads: int) -> None:
    group = plan.group_size(heads)
    for k, tokens, seed in ((2048, 2 * group + 1, 0), (65, 3 * group, 1), (1, group, 2)):
        rows = group * k + 100
        topk = select(name, tokens, k, rows, generator(seed), group)
        starts = plan.group_starts([0, min(group + 1, tokens), tokens], heads)
        start = torch.tensor(starts, dtype=torch.int32, device="cuda")
        unions = kernel.Unions.empty(len(starts) - 1, heads, k, "cuda")
        for buffer in (unions.slots, unions.masks, unions.counts):
            buffer.fill_(-7)
        kernel.build_unions(topk.cuda(), start, heads, plan.span_of(rows), rows, kernel.Rows(), unions)
        assert selfcheck.check_unions(unions, topk, starts, kernel.Rows()) == ""


def test_a_union_of_the_largest_span() -> None:
    topk = select("random", 9, 2048, 1 << 20, generator(3))
    topk[0, :3] = torch.tensor([(1 << 20) - 1, 0, -1])
    topk[0, 3:] = -1
    unions = kernel.Unions.empty(2, 8, 2048, "cuda")
    start = torch.tensor([0, 8, 9], dtype=torch.int32, device="cuda")
    kernel.build_unions(topk.cuda(), start, 8, 1 << 20, 1 << 20, kernel.Rows(), unions)
    assert selfcheck.check_unions(unions, topk, [0, 8, 9], kernel.Rows()) == ""


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("k", [16, 300])
@pytest.mark.parametrize("heads", plan.HEADS)
def test_selfcheck(heads: int, k: int, fp8: bool) -> None:
    assert selfcheck.check("cuda", heads, k, fp8) == ""


@pytest.mark.parametrize("heads", plan.HEADS)
@pytest.mark.parametrize("name", SELECTIONS)
def test_selections(name: str, heads: int) -> None:
    group = plan.group_size(heads)
    for k, tokens, fp8 in ((2048, 2 * group + 1, False), (333, 3 * group + 1, True), (64, group - 1, False)):
        rows = max(4096, group * k + 5)
        topk = select(name, tokens, k, rows, generator(k), group)
        q_nope, q_rope, kv = make(tokens, heads, rows, k, fp8)
        assert_close(q_nope, q_rope, kv, topk, plan.group_starts([0, 1, tokens], heads), (k, tokens, fp8))


def test_random_shapes() -> None:
    rng = random.Random(7)
    for n in range(200):
        heads, k = rng.choice(plan.HEADS), rng.choice((1, 7, 64, 512, 1008, 2048))
        bounds = [rng.randint(0, 3)]
        for _ in range(rng.randint(1, 5)):
            bounds.append(bounds[-1] + rng.randint(0, 40))
        tokens, rows = bounds[-1] + 2, k * 8 + rng.randint(1, 5000)
        q_nope, q_rope, kv = make(tokens, heads, rows, n, rng.random() < 0.4)
        topk = select(rng.choice(SELECTIONS), tokens, k, rows, generator(n), plan.group_size(heads))
        starts = plan.group_starts(bounds, heads)
        if starts[0] < starts[-1]:
            assert_close(q_nope, q_rope, kv, topk, starts, (n, heads, k, bounds, rows))


@pytest.mark.parametrize("heads", plan.HEADS)
@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0])
def test_overlap(heads: int, ratio: float) -> None:
    group = plan.group_size(heads)
    topk = overlapping(5 * group, 2048, 20000, min(ratio, group), group, generator(5))
    assert_close(*make(5 * group, heads, 20000, 6), topk, plan.group_starts([0, 5 * group], heads))


def test_duplicates_are_refused_with_nan_and_only_there() -> None:
    q_nope, q_rope, kv = make(12, 16, 500, 8)
    topk = select("random", 12, 40, 500, generator(8))
    good = run(q_nope, q_rope, kv, topk.cuda(), [0, 4, 8, 12])
    topk[5, 7] = topk[5, 30]
    out, lse = run(q_nope, q_rope, kv, topk.cuda(), [0, 4, 8, 12])
    assert bool(out[4:8].isnan().all()) and bool(lse[4:8].isnan().all())
    for part in (slice(0, 4), slice(8, 12)):
        assert torch.equal(out[part], good[0][part]) and torch.equal(lse[part], good[1][part])


def test_tables_of_requests_and_blocks_with_gaps() -> None:
    """Blocks of 64 positions that lie 96 rows apart, as in a cache shared by several layers."""
    heads, k, block_rows = 16, 500, 96
    tables = torch.randperm(60, generator=generator(9))[:48].reshape(3, 16).to(torch.int32).cuda()
    requests = torch.tensor([2] * 9 + [0] * 6, dtype=torch.int32, device="cuda")
    topk = select("random", 15, k, 1024, generator(9)).cuda()
    topk[:, 3] = 1024 + 77  # behind the table: no key, as in upstream's conversion
    q_nope, q_rope, kv = make(15, heads, 60 * block_rows, 9)
    rows = kernel.Rows(requests, tables, 64, block_rows)
    starts = plan.group_starts([0, 9, 15], heads)
    found = run(q_nope, q_rope, kv, topk, starts, rows, span=2048)
    selected = fallback.cache_rows(topk, requests, tables, 64, block_rows, 2048, kv.shape[0])
    wanted = reference.attend(torch.cat([q_nope, q_rope], 2), kv, selected, SCALE)
    error, error_lse = errors(found, wanted)
    assert error <= selfcheck.TOLERANCE and error_lse <= selfcheck.TOLERANCE_LSE


def test_offsets_beyond_4_gib() -> None:
    rows = (5 << 30) // 1152
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free memory")
    kv = torch.zeros(rows, 576, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[rows // 64 - 1, 0, rows // 128]], dtype=torch.int32, device="cuda")
    for block in table[0].tolist():
        kv[block * 64 : block * 64 + 64] = torch.randn(64, 576, generator=generator(block)).cuda()
    q_nope, q_rope, _ = make(8, 8, 1, 10)
    topk = select("random", 8, 100, 192, generator(10)).cuda()
    where = kernel.Rows(None, table, 64, 64)
    found = run(q_nope, q_rope, kv, topk, [0, 8], where, span=256)
    selected = fallback.cache_rows(topk, None, table, 64, 64, 256, rows)
    wanted = reference.attend(torch.cat([q_nope, q_rope], 2), kv, selected, SCALE)
    error, error_lse = errors(found, wanted)
    assert error <= selfcheck.TOLERANCE and error_lse <= selfcheck.TOLERANCE_LSE


@pytest.mark.parametrize("heads", plan.HEADS)
def test_ranges_and_sinks(heads: int) -> None:
    """DeepSeek-V4's form on synthetic ranges: keys of 512 elements, prefix and window of a group's list."""
    group, g = plan.group_size(heads), generator(11)
    tokens, entries, count = 3 * group, 640, 601
    q = torch.randn(tokens, heads, 512, generator=g).to(torch.bfloat16).cuda()
    kv = torch.randn(3000, 512, generator=g).to(torch.bfloat16).cuda()
    slots = torch.full((3, entries), -1, dtype=torch.int32)
    ranges = torch.zeros(tokens, 3, dtype=torch.int32)
    selected = torch.full((tokens, count), -1)
    for t in range(tokens):
        n = t // group
        if t % group == 0:
            slots[n, :count] = torch.randperm(3000, generator=g)[:count].int()
        prefix, window = 473 - t % group, 480 + t % group
        ranges[t] = torch.tensor([prefix, window, window + 100])
        mine = torch.cat([slots[n, :prefix], slots[n, window : window + 100]])
        selected[t, : mine.numel()] = mine
    counts = torch.full((3,), count, dtype=torch.int32, device="cuda")
    unions = kernel.Unions(slots.cuda(), torch.empty(3, 0, group, dtype=torch.int64, device="cuda"), counts)
    starts = torch.tensor([0, group, 2 * group, tokens], dtype=torch.int32, device="cuda")
    sinks = torch.randn(heads, generator=g).cuda()
    out = torch.full((tokens, heads, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((tokens, heads), torch.nan, device="cuda")
    kernel.attend_unions(q, None, kv, starts, unions, SCALE, out, lse, ranges=ranges.cuda(), sinks=sinks)
    wanted = reference.attend(q, kv, selected.cuda(), SCALE, 512, sinks)
    error, error_lse = errors((out, lse), wanted)
    assert error <= selfcheck.TOLERANCE and error_lse <= selfcheck.TOLERANCE_LSE


def test_many_groups_and_the_same_result_on_every_run() -> None:
    """More groups than one pair of launches takes; a race would show as a change."""
    tokens, k = 8 * plan.groups_at_once(8, 2048) + 40, 2048
    q_nope, q_rope, kv = make(tokens, 8, 9000, 12)
    topk = overlapping(64, k, 9000, 1.5, 8, generator(12)).cuda().repeat(tokens // 64 + 1, 1)[:tokens]
    starts = plan.group_starts([0, tokens], 8)
    first = run(q_nope, q_rope, kv, topk, starts)
    counts = torch.full((len(starts) - 1,), -7, dtype=torch.int32, device="cuda")
    start = torch.tensor(starts, dtype=torch.int32, device="cuda")
    out = torch.empty_like(first[0])
    kernel.litedsa(q_nope, q_rope, kv, topk, start, plan.span_of(9000), SCALE, out, None, None, counts)
    assert torch.equal(out, first[0])
    few = [union.keys.numel() for union in reference.unions(topk[:64].cpu(), starts[:9])]
    assert counts[:8].tolist() == few and bool((counts[-5:] > 0).all())
    for _ in range(3):
        again = run(q_nope, q_rope, kv, topk, starts)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    q = torch.cat([q_nope, q_rope], 2)
    for part in (slice(0, 24), slice(tokens - 24, tokens)):
        wanted = reference.attend(q[part], kv, topk[part], SCALE)
        error, error_lse = errors((first[0][part], first[1][part]), wanted)
        assert error <= selfcheck.TOLERANCE and error_lse <= selfcheck.TOLERANCE_LSE


def test_graph_capture() -> None:
    q_nope, q_rope, kv = make(40, 16, 3000, 13)
    topk = select("random", 40, 512, 3000, generator(13)).cuda()
    starts = torch.tensor(plan.group_starts([0, 40], 16), dtype=torch.int32, device="cuda")
    out = torch.empty(40, 16, 512, dtype=torch.bfloat16, device="cuda")
    kernel.litedsa(q_nope, q_rope, kv, topk, starts, 3072, SCALE, out)
    torch.cuda.synchronize()
    wanted = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.litedsa(q_nope, q_rope, kv, topk, starts, 3072, SCALE, out)
    for _ in range(2):
        out.fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("heads", plan.HEADS)
def test_no_worse_than_upstream(heads: int) -> None:
    """Mean squared error against float64, ours and flash_mla_sparse_fwd's, on the same inputs."""
    flashmla = pytest.importorskip("vllm.v1.attention.ops.flashmla")
    if not flashmla.is_flashmla_sparse_supported()[0]:
        pytest.skip("this vLLM has no FlashMLA")
    tokens = 40
    q_nope, q_rope, kv = make(tokens, heads, 20000, 14)
    topk = overlapping(tokens, 2048, 20000, 1.9, plan.group_size(heads), generator(14)).cuda()
    out, lse = run(q_nope, q_rope, kv, topk, plan.group_starts([0, tokens], heads))
    q = torch.cat([q_nope, q_rope], 2)
    padded = torch.zeros(tokens, 64, 576, dtype=torch.bfloat16, device="cuda")
    padded[:, :heads] = q
    theirs, _, their_lse = flashmla.flash_mla_sparse_fwd(padded, kv[:, None], topk[:, None], SCALE)
    value, total = reference.attend(q, kv, topk, SCALE)
    ours_error = (out - value).norm() / value.norm()
    their_error = (theirs[:, :heads] - value).norm() / value.norm()
    assert float(ours_error) <= 1.1 * float(their_error)
    torch.testing.assert_close(lse, their_lse[:, :heads], rtol=1e-4, atol=1e-4)  # natural, as upstream's
    assert float((lse - total).abs().max() / total.abs().max()) <= selfcheck.TOLERANCE_LSE


def test_no_groups() -> None:
    q_nope, q_rope, kv = make(3, 8, 100, 15)
    out = torch.full((3, 8, 512), POISON, dtype=torch.bfloat16, device="cuda")
    topk = select("random", 3, 16, 100, generator(15)).cuda()
    kernel.litedsa(q_nope, q_rope, kv, topk, torch.zeros(1, dtype=torch.int32, device="cuda"), 128, 1.0, out)
    torch.cuda.synchronize()
    assert bool((out == POISON).all())
