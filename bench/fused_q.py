# SPDX-License-Identifier: Apache-2.0
"""Times the prefill-shaped query packing kernel against upstream's on one GPU, after checking every bit.

    python bench/fused_q.py check            # bit comparison only
    python bench/fused_q.py sweep            # block sizes
    python bench/fused_q.py table --out DIR  # the published table, one results file per line
    python bench/fused_q.py neighbours --out DIR  # norms and rotation, and ours without an indexer

``--upstream KERNELS_PY`` takes the pinned tree's ``vllm/models/deepseek_v32/common/kernels.py`` and runs it
on the machine's own torch and Triton; without it an installed patched vLLM is used, of 0.28.0 for that line's
rows alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fused_q_check
import fused_q_neighbours
import results_file
import run_info
from fused_q_cases import (
    Shape,
    call_ours,
    call_ours_0_28,
    call_upstream,
    call_upstream_0_28,
    cos_sin_cache,
    extract_kernel,
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
    times = []
    # Not in a graph: there the copy becomes a copy-engine node, a third slower than the driver's kernel.
    for _ in range(runs + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        dst.copy_(src)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * src.numel() / (statistics.median(times[2:]) * 1e9)


def calls_for(kernels: Any, launch: Any, shape: Shape, tokens: int, caches: Any) -> tuple[list, list]:
    copies = max(4, min(64, -(-WORKING_SET // shape.bytes(tokens))))
    theirs, ours = [], []
    for _ in range(copies):
        inputs = make_inputs(shape, tokens, caches)
        outputs = poisoned_outputs(shape, inputs)
        theirs.append(lambda inputs=inputs: call_upstream(kernels, shape, inputs))
        ours.append(lambda inputs=inputs, outputs=outputs: call_ours(launch, shape, inputs, outputs))
    return theirs, ours


def calls_0_28(
    launch: Any, index: int, tokens: int, caches: Any, source: Path, double: bool
) -> tuple[tuple[list, list], int]:
    """Calls of 0.28.0's kernel and of ours, and the bytes of one."""
    kernel = extract_kernel(source, "_fused_indexer_q_rope_quant_kernel")
    shape = Shape(16, index, False)
    nbytes = tokens * (8 + 256 + index * (128 * 3 + 6))
    pair: tuple[list, list] = ([], [])
    for _ in range(max(4, min(64, -(-WORKING_SET // nbytes)))):
        inputs = make_inputs(shape, tokens, caches)
        out = poisoned_outputs(shape, inputs)
        pair[0].append(partial(call_upstream_0_28, kernel, shape, inputs, out))
        pair[1].append(partial(call_ours_0_28, launch, shape, inputs, out, double))
    return pair, nbytes


def sweep_0_28(launch: Any, caches: Any, source: Path, runs: int) -> None:
    for index, tokens in product((64, 32), (1, 2, 4, 8, 64, 256, 1024, 4096, 16384)):
        pair, nbytes = calls_0_28(launch, index, tokens, caches, source, True)
        for rows, warps in ((8, 1), (16, 2), (32, 4), (64, 8), (16, 1), (32, 2)):
            launch.INDEX_ROWS, launch.NUM_WARPS = rows, warps
            theirs, ours = paired_us(*pair, runs)
            chained_us = paired_us(chained(pair[0]), chained(pair[1]), runs) if tokens <= 64 else (0.0, 0.0)
            print(
                f"sweep 0.28.0 index={index} T={tokens} rows={rows} warps={warps}: "
                f"{theirs:.3f} {ours:.3f} us, "
                f"{nbytes / ours / 1e6:.2f} TB/s; chained {chained_us[0]:.3f} {chained_us[1]:.3f}",
                flush=True,
            )


def sweep(kernels: Any, launch: Any, caches: Any, runs: int) -> None:
    configs = [(16, 1), (16, 2), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8)]
    for shape in [Shape(16, 64, False), Shape(8, 32, True)]:
        theirs, ours = calls_for(kernels, launch, shape, 16384, caches)
        small = calls_for(kernels, launch, shape, 256, caches)[1]
        for rows, warps in configs:
            launch.INDEX_ROWS = launch.PE_ROWS = rows
            launch.NUM_WARPS = warps
            us, us_small = paired_us(ours, small, runs)
            rate = shape.bytes(16384) / us / 1e6
            print(
                f"sweep {shape.heads}/{shape.index} rows={rows} warps={warps} "
                f"16384: {us:.1f} us {rate:.2f} TB/s  256: {us_small:.2f} us",
                flush=True,
            )
    # The NoPE role exists with an FP8 query only.
    shape = Shape(16, 64, False, fp8_query=True)
    theirs, ours = calls_for(kernels, launch, shape, 8192, caches)
    launch.INDEX_ROWS, launch.PE_ROWS, launch.NUM_WARPS = 32, 32, 4
    for nope in (2, 4, 8):
        launch.NOPE_ROWS = nope
        us, up = paired_us(ours, theirs, runs)
        print(
            f"sweep fp8 query nope={nope} {us:.1f} us {shape.bytes(8192) / us / 1e6:.2f} TB/s ({up:.1f})",
            flush=True,
        )


def chained(calls: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Put a small kernel after each call. Launched back to back, independent kernels overlap; in a decode
    step each waits for the one before, so at small token counts this is the time that counts."""
    mark = torch.zeros(1, device="cuda")

    def both(call: Callable[[], Any]) -> None:
        call()
        mark.add_(1.0)

    return [lambda call=call: both(call) for call in calls]


def measure(
    pair: tuple[list, list],
    case: str,
    nbytes: int,
    tokens: int,
    copy: float,
    runs: int,
    common: dict[str, Any],
) -> list[dict[str, Any]]:
    up, us = paired_us(*pair, runs)

    def row(metric: str, unit: str, baseline: float, ours: float, ratio: float) -> dict[str, Any]:
        values = {"baseline": baseline, "ours": ours, "ratio": ratio}
        return {"case": case, "metric": metric, "unit": unit} | values | common

    base_rate, rate = nbytes / up / 1e6, nbytes / us / 1e6
    rows = [
        row("time", "us", up, us, up / us),
        row("bytes", "B", nbytes, nbytes, 1.0),
        row("fraction of copy bandwidth", "1", base_rate / copy, rate / copy, rate / base_rate),
    ]
    text = f"{case}: {up:.2f} -> {us:.2f} us, x{up / us:.2f}, {100 * rate / copy:.0f} % of copy"
    if tokens <= 512:
        up, us = paired_us(chained(pair[0]), chained(pair[1]), runs)
        rows.append(row("time with a dependent kernel", "us", up, us, up / us))
        text += f"; chained {up:.2f} -> {us:.2f} us"
    print(text, flush=True)
    return rows


def about(args: argparse.Namespace) -> dict[str, Any]:
    """What every row says of its run."""
    import triton

    return run_info.facts(args.commit) | {"runs": args.runs, "triton": triton.__version__}


def table(kernels: Any, launch: Any, caches: Any, args: argparse.Namespace) -> None:
    common, card = about(args), torch.cuda.get_device_name()
    copy = copy_tb_per_s(args.runs)
    print(f"copy {copy:.2f} TB/s")
    ceiling = {
        "case": "copy",
        "metric": "copy bandwidth",
        "unit": "TB/s",
        "baseline": copy,
        "ours": copy,
        "ratio": 1.0,
    }
    results: dict[str, list[dict[str, Any]]] = {}
    shapes = SHAPES + [Shape(s.heads, s.index, s.interleave, fp8_query=True) for s in SHAPES[:2]]
    shapes += [Shape(16, 64, False, has_indexer=False)]
    for shape, tokens in product(shapes if kernels else [], TOKENS):
        suffix = " query=fp8" * shape.fp8_query + " indexer=no" * (not shape.has_indexer)
        case = f"kernel T={tokens} heads={shape.heads} index={shape.index}{suffix}"
        pair = calls_for(kernels, launch, shape, tokens, caches)
        rows = results.setdefault("0.33.0", [ceiling | common])
        rows += measure(pair, case, shape.bytes(tokens), tokens, copy, args.runs, common)
    if args.line_0_28:
        for double, index, tokens in product((False, True), (64, 32), TOKENS):
            pair, nbytes = calls_0_28(launch, index, tokens, caches, args.line_0_28, double)
            case = f"kernel T={tokens} heads=any index={index}{' factors=float64' * double}"
            rows = results.setdefault("0.28.0", [ceiling | common])
            rows += measure(pair, case, nbytes, tokens, copy, args.runs, common)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        notes = f"{card}; upstream's kernel and ours on the same torch and Triton, CUDA graph replays in turn"
        for line, rows in results.items():
            doc = {
                "schema": 1,
                "kind": "ratio",
                "feature": "fused_q",
                "line": line,
                "card": "h200",
                "rows": rows,
            }
            (args.out / f"{line}-h200.json").write_text(json.dumps(doc | {"notes": notes}, indent=1) + "\n")


def neighbours(kernels: Any, launch: Any, caches: Any, args: argparse.Namespace) -> None:
    """What stands beside the query packing, and copies of as many bytes; rows go into ``--out``."""
    common = about(args)
    copy = copy_tb_per_s(args.runs)
    rows = []
    for case, nbytes, calls in fused_q_neighbours.cases(kernels, launch, caches):
        copies = fused_q_neighbours.copies_of(nbytes, len(calls))
        us, plain = paired_us(calls, copies, args.runs)
        found = {
            "time": ("us", us, us, 1.0),
            "bytes": ("B", nbytes, nbytes, 1.0),
            "fraction of copy bandwidth": ("1", *(nbytes / us / 1e6 / copy,) * 2, 1.0),
            "time of an elementwise kernel of as many bytes": ("us", plain, us, plain / us),
        }
        for metric, (unit, baseline, ours, ratio) in found.items():
            values = {"baseline": baseline, "ours": ours, "ratio": ratio}
            rows.append({"case": case, "metric": metric, "unit": unit} | values | common)
        rate = 100 * nbytes / us / 1e6 / copy
        print(f"{case}: {us:.2f} us, {rate:.0f} % of copy; elementwise {plain:.2f} us", flush=True)
    if args.out is not None:
        results_file.add(args.out / "0.33.0-h200.json", "fused_q", "0.33.0", rows, replace=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=["check", "sweep", "table", "neighbours"])
    parser.add_argument("--upstream", type=Path, metavar="KERNELS_PY")
    parser.add_argument(
        "--line-0-28", type=Path, metavar="FILE", help="0.28.0's layers/sparse_attn_indexer.py"
    )
    parser.add_argument(
        "--shard", default="0/1", help="check only every n-th shape (several processes compile faster)"
    )
    parser.add_argument("--rows", type=int, help="rows per program, in place of the built-in choice")
    parser.add_argument("--warps", type=int)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    kernels, launch = load_kernels(args.upstream)
    if kernels is None:
        from vllm.model_executor.layers import sparse_attn_indexer

        args.line_0_28 = args.line_0_28 or Path(sparse_attn_indexer.__file__)
    if args.rows:
        launch.INDEX_ROWS = launch.PE_ROWS = args.rows
    if args.warps:
        launch.NUM_WARPS = args.warps
    caches = cos_sin_cache(torch.float32), cos_sin_cache(torch.float32)
    for what in args.what:
        start = time.time()
        if what == "check":
            shard = tuple(int(n) for n in args.shard.split("/"))
            if fused_q_check.run(kernels, launch, args.line_0_28, (shard[0], shard[1])):
                return 1
        elif what == "sweep":
            if kernels is not None:
                sweep(kernels, launch, caches, args.runs)
            if args.line_0_28 is not None:
                sweep_0_28(launch, caches, args.line_0_28, args.runs)
        elif what == "table":
            table(kernels, launch, caches, args)
        else:
            neighbours(kernels, launch, caches, args)
        print(f"[{what}: {time.time() - start:.0f} s]", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
