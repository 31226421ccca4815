# SPDX-License-Identifier: Apache-2.0
"""Times the prefill-shaped query packing kernel against upstream's on one GPU, after checking every bit.

    python bench/fused_q.py check            # bit comparison only
    python bench/fused_q.py sweep            # block sizes
    python bench/fused_q.py table --out F    # the published table, rows of the results schema
    python bench/fused_q.py neighbours --line-0-28 FILE

``--upstream KERNELS_PY`` takes the pinned tree's ``vllm/models/deepseek_v32/common/kernels.py`` and runs it on the
machine's own torch and Triton; without it an installed patched vLLM is used.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fused_q_check  # noqa: E402
from fused_q_cases import (  # noqa: E402
    ROOT,
    Shape,
    call_ours,
    call_upstream,
    cos_sin_cache,
    load_kernels,
    make_inputs,
    poisoned_outputs,
)

# (heads, index heads): one rank of TP8 of DeepSeek-V3.2, one rank of TP8 of GLM-5.x, V3.2 on one card.
SHAPES = [Shape(16, 64, False), Shape(8, 32, True), Shape(128, 64, False)]
TOKENS = [1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384]
WORKING_SET = 256 << 20  # several times the 60 MB L2: every launch of a replay finds its inputs in memory


def graph_of(calls: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, launches: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / launches


def paired_us(a: list[Callable[[], Any]], b: list[Callable[[], Any]], runs: int) -> tuple[float, float]:
    """Median microseconds per launch of two lists of calls, replayed in turn."""
    graphs = graph_of(a), graph_of(b)
    for graph in graphs:
        graph.replay()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        times[0].append(replay_us(graphs[0], len(a)))
        times[1].append(replay_us(graphs[1], len(b)))
    return statistics.median(times[0]), statistics.median(times[1])


def copy_tb_per_s(runs: int) -> float:
    """Device-to-device copy bandwidth, bytes read plus bytes written, the ceiling of a byte-bound kernel."""
    src = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    dst = torch.empty_like(src)
    us = paired_us([lambda: dst.copy_(src)], [lambda: dst.copy_(src)], runs)[0]
    return 2 * src.numel() / us / 1e6


def calls_for(kernels: Any, launch: Any, shape: Shape, tokens: int, caches: Any) -> tuple[list, list]:
    copies = max(4, min(64, -(-WORKING_SET // shape.bytes(tokens))))
    theirs, ours = [], []
    for _ in range(copies):
        inputs = make_inputs(shape, tokens, caches)
        outputs = poisoned_outputs(shape, inputs)
        theirs.append(lambda inputs=inputs: call_upstream(kernels, shape, inputs))
        ours.append(lambda inputs=inputs, outputs=outputs: call_ours(launch, shape, inputs, outputs))
    return theirs, ours


def sweep(kernels: Any, launch: Any, caches: Any, runs: int, only: str) -> None:
    configs = [(16, 1), (16, 2), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8)]
    for shape in [Shape(16, 64, False), Shape(8, 32, True)]:
        theirs, ours = calls_for(kernels, launch, shape, 16384, caches)
        small = calls_for(kernels, launch, shape, 256, caches)[1]
        for rows, warps in configs:
            launch.INDEX_ROWS = launch.PE_ROWS = rows
            launch.NUM_WARPS = warps
            us, us_small = paired_us(ours, small, runs)
            rate = shape.bytes(16384) / us / 1e6
            print(f"sweep {shape.heads}/{shape.index} rows={rows} warps={warps} "
                  f"16384: {us:.1f} us {rate:.2f} TB/s  256: {us_small:.2f} us", flush=True)
    # The NoPE role exists with an FP8 query only.
    shape = Shape(16, 64, False, fp8_query=True)
    theirs, ours = calls_for(kernels, launch, shape, 8192, caches)
    launch.INDEX_ROWS, launch.PE_ROWS, launch.NUM_WARPS = 32, 32, 4
    for nope in (2, 4, 8):
        launch.NOPE_ROWS = nope
        us, up = paired_us(ours, theirs, runs)
        print(f"sweep fp8 query nope={nope} {us:.1f} us {shape.bytes(8192) / us / 1e6:.2f} TB/s (upstream {up:.1f})",
              flush=True)


def git_commit() -> str:
    out = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return out.stdout.strip() or "unknown"


def table(kernels: Any, launch: Any, caches: Any, runs: int, out: Path | None, commit: str) -> None:
    import triton

    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"],
                            capture_output=True, text=True).stdout.strip()
    copy = copy_tb_per_s(runs)
    common = {"runs": runs, "commit": commit, "driver": driver.split(",")[0], "torch": torch.__version__,
              "triton": triton.__version__, "date": datetime.date.today().isoformat()}
    rows: list[dict[str, Any]] = [
        {"case": "copy", "metric": "copy bandwidth", "unit": "TB/s", "baseline": copy, "ours": copy, "ratio": 1.0} | common
    ]
    print(f"copy {copy:.2f} TB/s")
    shapes = SHAPES + [Shape(s.heads, s.index, s.interleave, fp8_query=True) for s in SHAPES[:2]]
    shapes += [Shape(16, 64, False, has_indexer=False)]
    for shape in shapes:
        tokens_list = TOKENS if shape in SHAPES else [1, 64, 256, 512, 1024, 4096, 16384]
        suffix = " query=fp8" * shape.fp8_query + " indexer=no" * (not shape.has_indexer)
        for tokens in tokens_list:
            theirs, ours = calls_for(kernels, launch, shape, tokens, caches)
            up, us = paired_us(theirs, ours, runs)
            case = f"kernel T={tokens} heads={shape.heads} index={shape.index}{suffix}"
            nbytes = shape.bytes(tokens)
            base_rate, rate = nbytes / up / 1e6, nbytes / us / 1e6
            rows.append({"case": case, "metric": "time", "unit": "us", "baseline": up, "ours": us, "ratio": up / us} | common)
            rows.append({"case": case, "metric": "bytes", "unit": "B", "baseline": nbytes, "ours": nbytes, "ratio": 1.0} | common)
            rows.append({"case": case, "metric": "fraction of copy bandwidth", "unit": "1", "baseline": base_rate / copy,
                         "ours": rate / copy, "ratio": rate / base_rate} | common)
            print(f"{case}: upstream {up:.2f} us, ours {us:.2f} us, x{up / us:.2f}, {100 * rate / copy:.0f} % of copy",
                  flush=True)
            del theirs, ours
    if out is not None:
        out.write_text(json.dumps({"schema": 1, "kind": "ratio", "feature": "fused_q", "line": "0.33.0",
                                   "card": "h200", "rows": rows, "notes": f"{driver}; upstream's kernel and ours on "
                                   "the same torch and Triton, CUDA graph replays in turn"}, indent=1) + "\n")


def neighbours(kernels: Any, caches: Any, runs: int, line_0_28: Path | None) -> None:
    """Upstream's neighbours with the same eyes: time and fraction of the copy bandwidth."""
    copy = copy_tb_per_s(runs)
    for tokens in (1, 64, 512, 4096, 16384):
        calls, nbytes = norm_rope_calls(kernels, tokens, caches)
        us = paired_us(calls, calls, runs)[0]
        print(f"norm_rope T={tokens}: {us:.2f} us, {100 * nbytes / us / 1e6 / copy:.0f} % of copy", flush=True)
    if line_0_28 is None:
        return
    kernel = extract_kernel(line_0_28, "_fused_indexer_q_rope_quant_kernel")
    for tokens, heads in product((1, 64, 512, 4096, 16384), (64, 32)):
        shape = Shape(16, heads, False)
        copies = max(4, min(64, WORKING_SET // (tokens * heads * 390)))
        calls = []
        for _ in range(copies):
            inp = make_inputs(shape, tokens, caches)
            fp8, weights, _ = poisoned_outputs(shape, inp)
            q, w = inp["index_q"], inp["index_weights"]

            def call(inp=inp, q=q, w=w, fp8=fp8, weights=weights):
                kernel[(q.shape[0], q.shape[1])](
                    inp["positions"], q, q.stride(0), q.stride(1), caches[1], caches[1].stride(0), fp8, fp8.stride(0),
                    fp8.stride(1), w, w.stride(0), w.stride(1), weights, weights.stride(0), weights.stride(1), 0.088,
                    0.125, fp8_min=-448.0, fp8_max=448.0, is_neox=True, num_warps=1)

            calls.append(call)
        us = paired_us(calls, calls, runs)[0]
        nbytes = tokens * (heads * (128 * 3 + 6) + 8 + 256)
        print(f"0.28.0 index q T={tokens} index={heads}: {us:.2f} us, {100 * nbytes / us / 1e6 / copy:.0f} % of copy",
              flush=True)


def norm_rope_calls(kernels: Any, tokens: int, caches: Any) -> tuple[list[Callable[[], Any]], int]:
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    blocks = tokens // 64 + 2
    # Read and write the latents, rotate, write both caches, clear the top-k rows.
    nbytes = tokens * (2 * 2 * (1536 + 512 + 64) + 576 * 2 + 128 * 2 + 132 + 4 * 2048 + 2 * 256 + 24)
    calls = []
    for _ in range(max(4, min(32, WORKING_SET // nbytes))):
        qkv = torch.randn(tokens, 1536 + 512 + 64, **bf16)
        q_c, kv_c, k_pe = qkv.split([1536, 512, 64], dim=-1)
        kw = torch.randn(tokens, 192, **bf16)
        slots = torch.randperm(blocks * 64, device="cuda")[:tokens]
        args: dict[str, Any] = dict(
            positions=torch.arange(tokens, device="cuda"), q_c=q_c, q_rms_norm_w=torch.ones(1536, **bf16), q_rms_eps=1e-6,
            kv_c=kv_c, kv_rms_norm_w=torch.ones(512, **bf16), kv_rms_eps=1e-6, k_pe=k_pe, k_rope_cos_sin_cache=caches[0],
            index_k=kw[:, :128], index_k_layer_norm_w=torch.ones(128, device="cuda"),
            index_k_layer_norm_bias=torch.zeros(128, device="cuda"), index_k_layer_norm_eps=1e-6,
            index_k_rope_cos_sin_cache=caches[1],
            topk_indices_buffer=torch.empty(tokens, 2048, dtype=torch.int32, device="cuda"), slot_mapping=slots,
            indexer_k_cache=torch.zeros(blocks, 64, 132, dtype=torch.uint8, device="cuda"),
            mla_kv_cache=torch.zeros(blocks, 64, 576, **bf16), mla_k_scale=torch.ones(1, device="cuda"),
            q_c_out=torch.empty_like(q_c), kv_c_out=torch.empty_like(kv_c), k_pe_out=torch.empty_like(k_pe))
        calls.append(lambda args=args: kernels.fused_norm_rope(**args))
    return calls, nbytes


def extract_kernel(path: Path, name: str) -> Any:
    """One Triton kernel out of a file that cannot be imported here."""
    source = path.read_text()
    node = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
    body = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n" + (ast.get_source_segment(source, node) or "")
    file = Path("/tmp") / f"{name}.py"
    file.write_text(body)
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["check", "sweep", "table", "neighbours"])
    parser.add_argument("--upstream", type=Path, metavar="KERNELS_PY")
    parser.add_argument("--line-0-28", type=Path, metavar="FILE", help="0.28.0's layers/sparse_attn_indexer.py")
    parser.add_argument("--shard", default="0/1", help="check only every n-th shape (several processes compile faster)")
    parser.add_argument("--rows", type=int, help="rows per program, in place of the built-in choice")
    parser.add_argument("--warps", type=int)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=git_commit())
    args = parser.parse_args()
    torch.manual_seed(0)
    kernels, launch = load_kernels(args.upstream)
    if args.rows:
        launch.INDEX_ROWS = launch.PE_ROWS = args.rows
    if args.warps:
        launch.NUM_WARPS = args.warps
    caches = cos_sin_cache(torch.float32), cos_sin_cache(torch.float32)
    for what in args.what:
        start = time.time()
        if what == "check":
            shard = tuple(int(n) for n in args.shard.split("/"))
            if fused_q_check.run(kernels, launch, (shard[0], shard[1])):
                return 1
        elif what == "sweep":
            sweep(kernels, launch, caches, args.runs, "")
        elif what == "table":
            table(kernels, launch, caches, args.runs, args.out, args.commit)
        else:
            neighbours(kernels, caches, args.runs, args.line_0_28)
        print(f"[{what}: {time.time() - start:.0f} s]", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
