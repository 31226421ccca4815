# SPDX-License-Identifier: Apache-2.0
"""MQA logits into a given buffer on a card: the bits of DeepGEMM's own, nothing outside, clear refusals."""

import random

import pytest
import torch
from vllm.dsa.logits_slab import selfcheck, slab
from vllm.dsa.logits_slab.layout import Layout
from vllm.utils import deep_gemm

from .logits_slab_cases import case, valid


def gpu_reason() -> str:
    """Why the op cannot run here, '' if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"compute capability {torch.cuda.get_device_capability()}, not 9.0"
    if not deep_gemm.has_mqa_logits_out():
        return "this DeepGEMM is not patched (docs/deepgemm.md)"
    return ""


pytestmark = pytest.mark.skipif(bool(gpu_reason()), reason=f"cannot run: {gpu_reason()}")

COMPRESSED = slab.COMPRESSED
POISON = 0x7FC0BEEF  # a NaN with a payload of its own
GUARD = 1 << 16  # elements


def own(q, kv, weights, ks, ke, width: int) -> torch.Tensor:
    return deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, ks, ke, width if COMPRESSED else False)


def into(q, kv, weights, ks, ke, width: int, out: torch.Tensor) -> None:
    deep_gemm.fp8_fp4_mqa_logits_out(q, kv, weights, ks, ke, width if COMPRESSED else False, out=out)


def guarded(rows: int, stride: int, more_rows: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned buffer of ``rows + more_rows`` rows inside of a guard zone: the whole, and the buffer."""
    whole = torch.full((2 * GUARD + (rows + more_rows) * stride,), POISON, dtype=torch.int32, device="cuda")
    start = GUARD + -whole.data_ptr() % 1024 // 4
    out = (
        whole[start : start + (rows + more_rows) * stride].view(torch.float32).view(rows + more_rows, stride)
    )
    return whole, out


def shapes(count: int, heads: int) -> list[tuple[int, int]]:
    rng = random.Random(heads)
    edges = [(1, 1), (1, 255), (3, 256), (4, 257), (127, 1024), (128, 1023), (129, 4096), (5, 65537)]
    drawn = [(rng.randint(1, 700), int(2 ** rng.uniform(0, 15))) for _ in range(count - len(edges))]
    return edges + drawn


@pytest.mark.parametrize("heads", [32, 64])
def test_the_same_bits_and_nothing_outside(heads: int):
    layout = Layout(heads, COMPRESSED)
    for seed, (queries, keys) in enumerate(shapes(60, heads)):
        arguments = case(queries, keys, heads, 128, seed, "cuda")
        mask = valid(*arguments[3:], keys, COMPRESSED)
        expected = own(*arguments, keys)
        rows, stride = layout.shape(queries, keys)
        assert expected.dtype == torch.float32 and expected.stride() == (stride, 1)
        whole, out = guarded(rows, stride, more_rows=seed % 3)
        into(*arguments, keys, out)
        got = out[:queries, :keys]
        assert torch.equal(got.view(torch.int32)[mask], expected.view(torch.int32)[mask]), (queries, keys)
        first = (out.data_ptr() - whole.data_ptr()) // 4
        assert (whole[:first] == POISON).all(), (queries, keys)
        assert (whole[first + rows * stride :] == POISON).all(), (queries, keys)


def test_written_again_with_another_shape_in_the_same_buffer():
    buffer = torch.zeros(
        Layout(64, COMPRESSED).most_bytes(64 << 20, 4096, 1 << 16) + 1024, dtype=torch.uint8
    ).cuda()
    logits = slab.Logits(buffer)
    for seed, (queries, keys) in enumerate([(256, 65536), (4096, 4096), (1, 7), (300, 50000), (2048, 8192)]):
        arguments = case(queries, keys, 64, 128, seed, "cuda")
        rest = {} if COMPRESSED else {"clean_logits": False}
        got = logits(*arguments, *((keys,) if COMPRESSED else ()), **rest)
        expected = own(*arguments, keys)
        mask = valid(*arguments[3:], keys, COMPRESSED)
        assert buffer.data_ptr() <= got.data_ptr() < buffer.data_ptr() + 1024
        assert got.stride() == expected.stride()
        assert torch.equal(got.view(torch.int32)[mask], expected.view(torch.int32)[mask])


@pytest.mark.parametrize("what", ["rows", "columns", "long rows", "dtype", "device", "dense", "dim", "start"])
def test_a_wrong_buffer_is_refused_and_not_written(what: str):
    arguments = case(130, 1000, 32, 128, 7, "cuda")
    rows, stride = Layout(32, COMPRESSED).shape(130, 1000)
    whole, out = guarded(rows + 1, stride + 256)
    flat = out.view(-1)
    bad = {
        "rows": flat[: (rows - 1) * stride].view(rows - 1, stride),
        "columns": flat[: rows * (stride - 256)].view(rows, stride - 256),
        "long rows": flat[: rows * (stride + 256)].view(rows, stride + 256),
        "dtype": flat[: rows * stride].view(torch.int32).view(rows, stride),
        "device": torch.empty(rows, stride),
        "dense": out[:rows, :stride],
        "dim": flat[: rows * stride],
        "start": flat[64 : 64 + rows * stride].view(rows, stride),
    }[what]
    with pytest.raises(
        (RuntimeError, ValueError), match=rf"at least \[{rows}, {stride}\] \({rows * stride * 4} bytes"
    ):
        into(*arguments, 1000, bad)
    assert (whole == POISON).all()
    into(*arguments, 1000, flat[: rows * stride].view(rows, stride))
    torch.cuda.synchronize()


@pytest.mark.parametrize("heads", [32, 64])
def test_the_check_at_start_up_passes(heads: int):
    assert selfcheck.failure(Layout(heads, COMPRESSED), 128, torch.device("cuda")) is None


def test_reserved_memory_does_not_grow_with_the_chunks():
    """Chunks as a growing context has them, with other memory in use between them."""
    budget, heads = 32 << 20, 64
    sizes = [(max(1, budget // 4 // keys), keys) for keys in range(4096, 131072, 4096)]
    buffer = torch.zeros(
        Layout(heads, COMPRESSED).most_bytes(budget, 2048, 131072) + 1024, dtype=torch.uint8
    ).cuda()
    logits = slab.Logits(buffer)
    rest = {} if COMPRESSED else {"clean_logits": False}
    reserved = []
    for seed, (queries, keys) in enumerate(sizes):
        arguments = case(min(queries, 2048), keys, heads, 128, seed, "cuda")
        before = torch.cuda.memory_stats()["reserved_bytes.all.current"]
        logits(*arguments, *((keys,) if COMPRESSED else ()), **rest)
        reserved.append(torch.cuda.memory_stats()["reserved_bytes.all.current"] - before)
    assert reserved == [0] * len(sizes)
