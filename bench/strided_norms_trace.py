# SPDX-License-Identifier: Apache-2.0
"""Profiles a prefill and decode steps in the vLLM engine and counts kernels that copy on the DSA path.

    python bench/strided_norms_trace.py --line 0.33.0 --out bench/results/strided_norms/0.33.0-h200.json

The slices of the fused QKV-A output go into norms, rotation and caches as they are, so the device should run
no kernel that copies one tensor to another in all of the model. The last rows are a control: a slice copied
by ``.contiguous()`` in the same profile must be seen.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import e2e_prefill
import fused_q_engine
import results_file

#: Kernels of torch and of the driver that copy within the device.
_COPY = re.compile(r"copy_kernel|CatArray|Memcpy DtoD|unrolled_elementwise_kernel.*copy", re.IGNORECASE)
#: What Inductor calls a kernel that makes a tensor contiguous. A "_to_copy" is a change of type in registers.
_INDUCTOR_COPY = re.compile(r"^triton_.*(clone|contiguous)")


def copies(kernels: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those of the kernels (name, launches) that copy."""
    return [k for k in kernels if _COPY.search(k[0]) or _INDUCTOR_COPY.search(k[0])]


def profiled(work: Any) -> list[tuple[str, int]]:
    """Kernels that ran during ``work()``, by name, with their launches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        work()
        torch.cuda.synchronize()
    events = [e for e in prof.key_averages() if e.self_device_time_total]
    return sorted(((e.key, e.count) for e in events), key=lambda k: (-k[1], k[0]))


def decode(engine: e2e_prefill.Engine, batch: int, tokens: int, steps: int) -> list[tuple[str, int]]:
    """Kernels of ``steps`` decode steps of ``batch`` requests after their prefill."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=steps + 8, temperature=0, ignore_eos=True, detokenize=False)
    inner = engine.llm.llm_engine
    for i in range(batch):
        inner.add_request(f"decode-{i}", e2e_prefill.prompt(tokens, 7000 + i), params)
    while len(inner.step()) < batch:  # until every request decodes
        if not inner.has_unfinished_requests():
            raise RuntimeError("the requests never decoded in one batch")

    def work() -> None:
        for _ in range(steps):
            inner.step()

    found = profiled(work)
    while inner.has_unfinished_requests():
        inner.step()
    return found


def rows_of(args: Any, case: str, kernels: list[tuple[str, int]]) -> list[dict[str, Any]]:
    import torch

    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    common = {
        "unit": "1",
        "commit": args.commit,
        "driver": subprocess.run(smi, capture_output=True, text=True).stdout.split("\n")[0],
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "runs": 1,
    }
    found = copies(kernels)
    return [
        {"case": case, "metric": "kernels", "value": sum(n for _, n in kernels), "names": kernels} | common,
        {"case": case, "metric": "copies", "value": sum(n for _, n in found), "names": found} | common,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--line", default="0.33.0", choices=["0.28.0", "0.33.0"])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--index-heads", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--memory", type=float, default=0.2, help="share of the card for the engine")
    parser.add_argument("--llm", type=json.loads, default={}, metavar="JSON", help="arguments for vllm.LLM")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.hf_config = {}
    args.llm = {"gpu_memory_utilization": args.memory, "max_num_seqs": 16} | args.llm
    os.environ.update(fused_q_engine.ALONE)
    engine = e2e_prefill.Engine(args)
    engine.prefill_seconds(args.tokens, 1)  # what compiles at first use is not of interest
    shape = f"heads={args.heads} index={args.index_heads}"

    def control() -> None:
        import torch

        engine.prefill_seconds(args.tokens, 3)
        torch.zeros(512, 2112, device="cuda", dtype=torch.bfloat16)[:, :1536].contiguous()

    rows = rows_of(
        args,
        f"engine prefill {shape} S={args.tokens}",
        profiled(lambda: engine.prefill_seconds(args.tokens, 2)),
    )
    rows += rows_of(
        args,
        f"engine decode {shape} B={args.batch} S=2100 steps={args.steps}",
        decode(engine, args.batch, 2100, args.steps),
    )
    rows += rows_of(args, f"engine prefill {shape} S={args.tokens} and one .contiguous()", profiled(control))
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.out:
        results_file.add(args.out, "strided_norms", args.line, rows, replace=True)
    by_case = {row["case"]: row["value"] for row in rows if row["metric"] == "copies"}
    *engines, controlled = by_case.values()
    if controlled != engines[0] + 1:
        print("error: the control's copy was not seen", file=sys.stderr)
        return 1
    return int(any(engines))


if __name__ == "__main__":
    sys.exit(main())
