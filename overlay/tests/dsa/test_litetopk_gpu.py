# SPDX-License-Identifier: Apache-2.0
"""The LiteTopK kernel: exact against a top-k of its own scores, which are close to the float64 reference."""

import random
from typing import Any

import pytest
import torch
from vllm.dsa import kernels
from vllm.dsa.litetopk import kernel, plan, reference, selfcheck

from .litetopk_cases import DISTRIBUTIONS, make


def gpu_reason() -> str:
    """Why the kernel cannot run here, '' if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return kernel.why_not(64, 128, 2048, torch.cuda.get_device_capability())


pytestmark = pytest.mark.skipif(bool(gpu_reason()), reason=f"kernel cannot run: {gpu_reason()}")

POISON = -12345
RANDOM = ("iid", "recency", "coarse", "negative", "nan")


def scores_of(case: tuple[torch.Tensor, ...]) -> torch.Tensor:
    scores = torch.full((case[0].shape[0], case[1].shape[0]), -torch.inf, device="cuda")
    kernel.litetopk_scores(*case, scores)
    return scores


def run(case: tuple[torch.Tensor, ...], k: int, how: plan.Plan | None = None) -> torch.Tensor:
    """The kernel's result, with canaries around each row and a poisoned workspace."""
    queries = case[0].shape[0]
    buffer = torch.full((queries + 2, k + 5), POISON, dtype=torch.int32, device="cuda")
    out = buffer[1:-1, :k]
    workspace = None
    if how is not None:
        workspace = torch.full((how.workspace,), 0x5A, dtype=torch.uint8, device="cuda")
    kernel.litetopk(*case, out, plan=how, workspace=workspace)
    outside = torch.ones_like(buffer, dtype=torch.bool)
    outside[1:-1, :k] = False
    assert bool((buffer[outside] == POISON).all()), "written outside of out"
    return out


def assert_exact(
    case: tuple[torch.Tensor, ...], k: int, how: plan.Plan | None = None, what: Any = ""
) -> None:
    ks, ke = case[4], case[5]
    out = run(case, k, how)
    count = (ke - ks).clamp(min=0, max=k)
    valid = torch.arange(k, device="cuda") < count[:, None]
    assert bool(((out >= 0) == valid).all()), f"valid ids are no prefix: {what}"
    assert bool((out[~valid] == -1).all()), f"tail is not -1: {what}"
    wanted = reference.top_positions(scores_of(case), ks, ke, k)
    assert torch.equal(out.sort(1).values, wanted.sort(1).values), f"other set: {what}"


def variant(queries: int, keys: int, heads: int, k: int, rng: random.Random) -> plan.Plan:
    """A plan that cuts ranges and lists at unusual places; the result must not depend on it."""
    whole, splits = rng.choice((0, 0, 1, 5)), rng.choice((1, 1, 2, 3, 7))
    workers = rng.choice((1, 7, 264, 396))
    segment, check = rng.choice(((512, 16), (768, 16), (1024, 8), (1536, 16), (64, 2)))
    fill = rng.choice((32, 48, 64, 96))
    size = plan.workspace_bytes(queries, heads, k, whole, splits, workers, segment, fill)
    return plan.Plan(whole, splits, workers, segment, check, fill, size)


@pytest.mark.parametrize("heads", plan.HEADS)
def test_scores_are_close_to_float64(heads: int) -> None:
    case = make(24, 5003, heads, requests=3, seed=heads)
    scores, exact = scores_of(case), reference.indexer_scores(*case[:4])
    column = torch.arange(5003, device="cuda")
    inside = (column >= case[4][:, None]) & (column < case[5][:, None])
    error = torch.where(inside, (scores - exact).abs(), 0).max()
    assert float(error) <= selfcheck.TOLERANCE * float(torch.where(inside, exact.abs(), 0).max())
    assert bool(torch.isneginf(scores[~inside]).all()), "written out of range"


@pytest.mark.parametrize("heads", plan.HEADS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_distributions(heads: int, distribution: str) -> None:
    rng = random.Random(0)
    for queries, keys, k, requests in (
        (37, 20011, 2048, 1),
        (16, 70003, 2048, 1),
        (130, 9001, 512, 7),
        (64, 33333, 1008, 3),
    ):
        case = make(queries, keys, heads, distribution, requests, seed=3)
        assert_exact(case, k, what=(queries, keys))
        assert_exact(case, k, variant(queries, keys, heads, k, rng), (queries, keys))


def test_random_shapes() -> None:
    rng = random.Random(5)
    for n in range(1500):
        heads, k = rng.choice(plan.HEADS), rng.choice(plan.TESTED_K)
        queries, keys = rng.randint(1, 60), int(2 ** rng.uniform(0, 14.5))
        requests = rng.choice((1, 1, 2, 5, 16))
        case = make(queries, keys, heads, rng.choice(RANDOM), requests, n)
        how = variant(queries, keys, heads, k, rng)
        assert_exact(case, k, how, (n, queries, keys, heads, k, requests, how))


def test_ranges_that_are_no_requests() -> None:
    """Any ranges are taken: empty, reversed, overlapping, beyond the keys."""
    rng = random.Random(1)
    for heads in plan.HEADS:
        q, k, scale, weights, _, _ = make(50, 9000, heads)
        bounds = [(rng.randint(-50, 9050), rng.randint(-50, 9050)) for _ in range(50)]
        ks = torch.tensor([b[0] for b in bounds], dtype=torch.int32, device="cuda").clamp(0, 9000)
        ke = torch.tensor([b[1] for b in bounds], dtype=torch.int32, device="cuda").clamp(0, 9000)
        assert_exact((q, k, scale, weights, ks, torch.maximum(ks, ke)), 512)
        wild = torch.tensor([b[1] for b in bounds], dtype=torch.int32, device="cuda")
        clamped, as_is = (run((q, k, scale, weights, ks, e), 512) for e in (torch.maximum(ks, ke), wild))
        assert torch.equal(clamped, as_is)


@pytest.mark.parametrize("heads", plan.HEADS)
def test_long_context(heads: int) -> None:
    """The most keys that the kernel takes, whose ranges are cut into many parts."""
    case = make(8, 1 << 20, heads, "recency", 2, seed=9)
    assert_exact(case, 2048)


def test_strided_inputs_and_output() -> None:
    q, k, scale, weights, ks, ke = make(40, 12000, 64, requests=2)
    wide_q = torch.zeros(40, 2, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    wide_q[:, 0] = q
    wide_w = torch.full((40, 100), torch.nan, device="cuda")
    wide_w[:, 3:67] = weights
    strided = (wide_q[:, 0], k, scale, wide_w[:, 3:67], ks, ke)
    assert torch.equal(run((q, k, scale, weights, ks, ke), 1024), run(strided, 1024))


@pytest.mark.parametrize("heads", plan.HEADS)
def test_same_result_and_order_on_every_run(heads: int) -> None:
    case = make(96, 50000, heads, "coarse", 2)
    first = run(case, 2048).clone()
    for _ in range(3):
        assert torch.equal(run(case, 2048), first)


def test_graph_capture() -> None:
    case = make(64, 30000, 64)
    how = plan.plan(64, 30000, 64, 2048, torch.cuda.get_device_properties(0).multi_processor_count)
    workspace = torch.empty(how.workspace, dtype=torch.uint8, device="cuda")
    wanted, out = run(case, 2048, how).clone(), torch.empty(64, 2048, dtype=torch.int32, device="cuda")
    kernel.litetopk(*case, out, plan=how, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.litetopk(*case, out, plan=how, workspace=workspace)
    for _ in range(2):
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out, wanted)


def test_no_queries_and_no_keys() -> None:
    q, k, scale, weights, ks, ke = make(4, 100, 32)
    out = torch.full((4, 64), POISON, dtype=torch.int32, device="cuda")
    kernel.litetopk(q, k[:0], scale[:0], weights, ks, ke, out)
    assert bool((out == -1).all())
    kernel.litetopk(q[:0], k, scale, weights[:0], ks[:0], ke[:0], out[:0])


@pytest.mark.parametrize("heads", plan.HEADS)
@pytest.mark.parametrize("k", plan.TESTED_K)
def test_selfcheck_passes_and_can_fail(heads: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert selfcheck.check("cuda", heads, k) == ""
    right = kernel.litetopk

    def off_by_one(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        args[6][3, 0] += 1

    monkeypatch.setattr(kernel, "litetopk", off_by_one)
    assert "wrong in 1 of 21 rows" in selfcheck.check("cuda", heads, k)


def test_wrong_arguments_are_named() -> None:
    q, k, scale, weights, ks, ke = make(4, 100, 32)
    out = torch.empty(4, 64, dtype=torch.int32, device="cuda")
    for change, words in (
        ({"q": q.float()}, "q is torch.float32"),
        ({"weights": weights[:3]}, "weights is"),
        ({"k": k[:, :64]}, "k is"),
        ({"ks": ks.cpu()}, "ks is on cpu"),
        ({"k_scale": torch.cat([scale, scale])[1:101]}, "k_scale must start"),
        ({"workspace": torch.empty(8, dtype=torch.uint8, device="cuda")}, "workspace must be"),
    ):
        good = {"q": q, "k": k, "k_scale": scale, "weights": weights, "ks": ks, "ke": ke, "out": out}
        with pytest.raises(ValueError, match=words):
            kernel.litetopk(**(good | change))
    with pytest.raises(kernels.KernelError, match="16 index heads"):
        kernel.litetopk(q[:, :16].contiguous(), k, scale, weights[:, :16].contiguous(), ks, ke, out)
