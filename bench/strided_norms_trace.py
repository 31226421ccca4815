# SPDX-License-Identifier: Apache-2.0
"""Profiles a prefill and decode steps in the vLLM engine and counts kernels that copy on the DSA path.

    python bench/strided_norms_trace.py --line 0.33.0 --out bench/results/strided_norms/0.33.0-h200.json

The slices of the fused QKV-A output go into norms, rotation and caches as they are, so in all of the step the
device should copy nothing as large as the narrowest of them; copies of a few bytes per token (ids, positions)
are the model runner's. The last rows are a control: a slice copied by ``.contiguous()`` must be seen.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import e2e_prefill
import fused_q_engine
import results_file
import run_info

#: Kernels of torch and of the driver that copy within the device.
_COPY = re.compile(r"copy_kernel|CatArray|Memcpy DtoD", re.IGNORECASE)
#: Torch's kernels that change the type, which no copy of a slice does.
_CAST = re.compile(r"StoreWithCast")
#: An Inductor kernel that only moves: its name lists the operators that it holds, and none of them computes.
_MOVES = "clone|contiguous|copy|view|slice|split|expand|permute|transpose|select|unsqueeze|squeeze|cat|t"
_INDUCTOR_COPY = re.compile(
    rf"^triton_poi_fused(_({_MOVES}))*_(clone|contiguous|copy|cat)(_({_MOVES}))*_\d+$"
)

#: Bytes per token of the narrowest slice of the path: 64 bfloat16 of the key's rotary part.
NARROWEST = 128
#: Most tokens of a step.
PER_STEP = 16384


def copies(kernels: dict[str, int]) -> dict[str, int]:
    """Those of the kernels (name: launches) that copy."""
    return {
        name: n
        for name, n in kernels.items()
        if (_COPY.search(name) and not _CAST.search(name)) or _INDUCTOR_COPY.search(name)
    }


def look(events: list[dict[str, Any]]) -> tuple[dict[str, int], list[tuple[str, int | None]]]:
    """Kernels and copies of a Kineto trace.

    Returns:
        Launches by name; and for each copy its name and the bytes that it writes: what the driver says, or
        the first operand of the operator that launched it at 4 bytes an element, or None if not known.
    """
    operators = {
        e["args"]["External id"]: e["args"].get("Input Dims")
        for e in events
        if e.get("cat") == "cpu_op" and "External id" in e.get("args", {})
    }
    kernels: collections.Counter[str] = collections.Counter()
    found: list[tuple[str, int | None]] = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        name, args = event["name"], event.get("args", {})
        kernels[name] += 1
        if not copies({name: 1}):
            continue
        dims = operators.get(args.get("External id"))
        size = args.get("bytes")
        if size is None and dims and all(isinstance(n, int) for n in dims[0]):
            size = 4 * math.prod(dims[0])
        found.append((name, size))
    return dict(kernels.most_common()), found


def profiled(work: Callable[[], Any]) -> tuple[dict[str, int], list[tuple[str, int | None]]]:
    """What `look` sees of ``work()``."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        prof.export_chrome_trace(str(trace))
        return look(json.loads(trace.read_text())["traceEvents"])


def decode(engine: e2e_prefill.Engine, batch: int, tokens: int, steps: int) -> Any:
    """What `look` sees of ``steps`` decode steps of ``batch`` requests after their prefill."""
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


def rows_of(args: Any, case: str, tokens: int, seen: Any) -> list[dict[str, Any]]:
    """Rows of one profile; ``tokens`` is the least number of tokens of a step in it."""
    common = run_info.facts(args.commit) | {"unit": "1", "runs": 1}
    kernels, found = seen
    sizes = [[name[:100], size, n] for (name, size), n in collections.Counter(found).items()]
    large = [c for c in sizes if c[1] is None or c[1] >= tokens * NARROWEST]

    def row(metric: str, value: int, more: dict[str, Any]) -> dict[str, Any]:
        return {"case": case, "metric": metric, "value": value} | more | common

    return [
        row("kernels", sum(kernels.values()), {"names": kernels}),
        row("copies", len(found), {"name_bytes_number": sizes}),
        row("copies as large as a slice", sum(n for *_, n in large), {"name_bytes_number": large}),
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
    args.llm["max_num_batched_tokens"] = PER_STEP
    os.environ.update(fused_q_engine.ALONE)
    engine = e2e_prefill.Engine(args)
    engine.prefill_seconds(args.tokens, 1)  # what compiles at first use is not of interest
    shape = f"heads={args.heads} index={args.index_heads}"

    def control() -> None:
        import torch

        engine.prefill_seconds(args.tokens, 3)
        torch.zeros(args.tokens, 2112, device="cuda", dtype=torch.bfloat16)[:, :1536].contiguous()

    least = args.tokens % PER_STEP
    prefill = f"engine prefill {shape} S={args.tokens}"
    rows = rows_of(args, prefill, least, profiled(lambda: engine.prefill_seconds(args.tokens, 2)))
    rows += rows_of(
        args,
        f"engine decode {shape} B={args.batch} S=2100 steps={args.steps}",
        args.batch,
        decode(engine, args.batch, 2100, args.steps),
    )
    rows += rows_of(args, f"{prefill} and a slice copied", least, profiled(control))
    for row in rows:
        print(json.dumps({k: v for k, v in row.items() if k != "names"}), flush=True)
    if args.out:
        results_file.add(args.out, "strided_norms", args.line, rows, replace=True)
    *engines, controlled = (row["value"] for row in rows if row["metric"] == "copies as large as a slice")
    if controlled != engines[0] + 1:
        print("error: the control's copy was not seen", file=sys.stderr)
        return 1
    return int(any(engines))


if __name__ == "__main__":
    sys.exit(main())
