"""bench/prefill_trace.py in Triton's interpreter, bench/fused_q_trace.py and bench/strided_norms_trace.py."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from vllm_series.envs import torch_env
from vllm_series.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]

SELECTIONS = """
import torch
import fused_q_live
import fused_q_trace
import prefill_trace as t

torch.manual_seed(0)
k, ends = 16, torch.tensor([300, 200, 10, 16, 17, 299, 64], dtype=torch.int32)
logits = torch.randn(7, 300).mul(4).round().div(4)  # many equal ones
sums = t.row_sums(logits, ends)
beyond, within = logits.clone(), logits.clone()
beyond[1, 250], within[1, 150] = 9, 9
assert torch.equal(t.row_sums(beyond, ends), sums)
assert (t.row_sums(within, ends) != sums).nonzero().tolist() == [[1]]
swapped = logits[:, [1, 0, *range(2, 300)]]
assert ((t.row_sums(swapped, ends) != sums) == (logits[:, 0] != logits[:, 1])).all()
assert t.row_sums(torch.zeros(2, 4, 128).to(torch.float8_e4m3fn)).shape == (2,)

def selected(seed):
    ids = torch.full((7, k), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    for row, end in enumerate(ends.tolist()):
        order = torch.randperm(end, generator=generator)
        best = order[logits[row, order].argsort(descending=True, stable=True)][:k]
        ids[row, : len(best)] = best
    return ids

a, b = selected(1), selected(2)
of_a, of_b = t.judge(logits, ends, a), t.judge(logits, ends, b)
assert of_a["exact"].all() and of_b["exact"].all() and torch.equal(of_a["values"], of_b["values"])
other = of_a["members"] != of_b["members"]
assert other.any() and not (other & ~of_a["open"]).any() and not of_a["open"][2:4].any()
wrong = a.clone()
wrong[0, 0] = logits[0].argmin()
assert t.judge(logits, ends, wrong)["exact"].tolist() == [False] + [True] * 6

def layer(found, ids):
    fixed = torch.zeros(7, dtype=torch.int64)
    stages = dict.fromkeys(t.STAGES, fixed) | {"logits": sums, "order of keys": t.row_sums(ids)}
    stages |= {"selected values": found["values"], "selected keys": found["members"]}
    return stages | {"exact": found["exact"], "open": found["open"]}

one, two = layer(of_a, a), layer(of_b, b)
parted = t.difference([one, one], [one, two])
n = int(other.sum())
assert parted["first"] == "layer 1: selected keys" and parted["unforced"] == [n, n], parted
assert t.difference([one], [one | {"order of keys": sums}])["first"] is None
parted = t.difference([one], [one | {"query bytes": sums, "logits": sums + 1}])
assert parted["first"] == "layer 0: query bytes"

def made(setting, layers, logprob):
    answer = {"token": 1, "logprobs": {"1": logprob, "2": -3.0}}
    layers = [dict(layer) for layer in layers]
    return fused_q_trace.compact({"setting": setting, "length": 64, "answer": answer, "layers": layers})

runs = [made("off", [one, one], -1.0), made("on", [one, one], -1.0), made("off", [two, one], -1.5)]
found = fused_q_trace.compare(runs, {64: runs[0]})[64]
assert [r["first"] for r in found["on"]] == [None] and found["on"][0]["same_logprobs"]
assert [r["first"] for r in found["off"]] == ["layer 0: selected keys"]
assert found["off"][0]["largest_difference"] == 0.5 and found["off"][0]["inexact"] == 0
assert found["off"][0]["open"] == [int(of["open"].sum()) for of in (of_b, of_a)]

for ids in (a, b):
    t.settle(logits, ends, ids, of_a["open"].nonzero()[:, 0])
assert torch.equal(a.sort(1).values, b.sort(1).values) and t.judge(logits, ends, a)["exact"].all()

x = torch.arange(6, dtype=torch.float32)
assert fused_q_live.differing_bytes((x, x[:2]), (x, x[:2])) == (0, 32)
assert fused_q_live.differing_bytes((x,), (x + 0.0 * x - (x == 3).float(),)) == (1, 24)
"""


@pytest.mark.torch
def test_selections_are_compared_by_their_values_and_equal_keys_are_decided(tmp_path: Path) -> None:
    python = torch_env(Workspace(ROOT), "0.33.0")
    env = os.environ | {
        "PYTHONPATH": str(ROOT / "bench"),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run([python, "-c", SELECTIONS], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("strided_norms_trace")


def test_kernels_that_copy_are_known_by_name(norms: ModuleType) -> None:
    copying = {
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(...)>": 3,
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>": 1,
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>>": 1,
        "Memcpy DtoD (Device -> Device)": 2,
        "triton_poi_fused_clone_3": 1,
        "triton_poi_fused_slice_cat_view_12": 1,
    }
    others = {
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<TiledCopy, Gemm>>": 24,
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": 6,
        "triton_poi_fused_add_clone_copy_mul_neg_slice_split_stack_view_6": 6,
        "triton_poi_fused_4": 1,
        "Memcpy HtoD (Pinned -> Device)": 9,
        "unrolled_elementwise_kernel<direct_copy_kernel_cuda, LoadWithCast<1>, StoreWithCast<1> >": 4,
        "_fused_norm_rope_kernel": 24,
    }
    assert norms.copies(others | copying) == copying


def test_copies_are_told_by_their_size(norms: ModuleType) -> None:
    copy, memory = "direct_copy_kernel_cuda", "Memcpy DtoD (Device -> Device)"
    events = [
        {
            "cat": "cpu_op",
            "name": "aten::copy_",
            "args": {"External id": 7, "Input Dims": [[8, 1536], [], []]},
        },
        {"cat": "kernel", "name": copy, "args": {"External id": 7}},
        {"cat": "kernel", "name": copy, "args": {"External id": 9}},
        {"cat": "gpu_memcpy", "name": memory, "args": {"bytes": 64}},
        {"cat": "kernel", "name": "norm", "args": {}},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"External id": 7}},
    ]
    kernels, found = norms.look(events)
    assert kernels == {copy: 2, memory: 1, "norm": 1}
    assert found == [(copy, 4 * 8 * 1536), (copy, None), (memory, 64)]
