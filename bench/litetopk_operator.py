# SPDX-License-Identifier: Apache-2.0
"""Times the LiteTopK kernel against upstream's indexer path, paired in one process on one GPU.

    litetopk_operator.py --line LINE [--set table|small|distributions|matrix ...] [--shapes N] [--resume]

Upstream's path is DeepGEMM's `fp8_fp4_mqa_logits` and `top_k_per_row_prefill`, once in the row slices of
the default 512 MiB logits budget and once as one matrix (at most --matrix-gib). Both are taken from an
installed vLLM. Where there is none, `--upstream DIR` names an unpacked wheel of it (of which only
`vllm/third_party/deep_gemm` is used) and `--top-k-library FILE` a shared library that launches upstream's
top-k kernel: `int up_topk(logits, starts, ends, out, rows, stride0, stride1, k, stream)`.

Each figure is the median of `runs` calls; ours and upstream's take turns. The GPU is kept busy while the host
launches a call, so that short calls are not the time of their launches. Rows of a case replace older ones
in FILE. Every result is checked: each position that ours selects scores at least upstream's cut-off minus
1e-3 * max(1, |cut-off|) in upstream's own logits (48 sampled rows).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import results_file
import run_info

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "overlay" / "tests"))
BUDGET = 512 << 20
AHEAD = 1_000_000  # clock cycles that the GPU waits before a call: longer than the host takes to launch one
K = 2048

#: (heads, queries, keys, requests, distribution)
Shape = tuple[int, int, int, int, str]
#: Rows from, to, keys from, to.
Slice = tuple[int, int, int, int]
TABLE: list[Shape] = [
    (heads, queries, keys, 1, "iid")
    for heads in (64, 32)
    for queries, keys in (
        (4096, 1 << 15),
        (8192, 1 << 16),
        (8192, 1 << 17),
        (8192, 1 << 18),
        (8192, 1 << 19),
        (8192, 1 << 20),
    )
]
SMALL: list[Shape] = [
    (heads, queries, keys, 1, "iid")
    for heads in (64, 32)
    for queries in (8, 64, 512, 1024, 2048, 4096)
    for keys in (1 << 15, 1 << 17, 1 << 18, 1 << 19, 1 << 20)
    if (queries, keys) != (4096, 1 << 15)  # of TABLE
]
DISTRIBUTIONS: list[Shape] = [
    (heads, 8192, 1 << 17, 1, d)
    for heads in (64, 32)
    for d in ("recency", "clustered", "heavy", "ascending", "descending", "equal")
]
#: The grid of vLLM's RFC 53563: history, requests, queries per request; 64 heads.
HISTORY = [
    n << 10 for n in (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
]
MATRIX: list[tuple[int, int, int]] = [
    (history, requests, queries)
    for history in HISTORY
    for requests in (1, 4, 16, 32, 128)
    for queries in (8, 64, 512, 1024, 2048, 4096, 8192)
]


class Upstream:
    """Upstream's two operators, however this machine has them."""

    def __init__(self, root: Path | None, library: Path | None) -> None:
        if root is None:
            from vllm import _custom_ops as ops
            from vllm.utils import deep_gemm

            self._logits: Callable[..., torch.Tensor] = deep_gemm.fp8_fp4_mqa_logits
            self._top_k: Callable[..., None] = ops.top_k_per_row_prefill
            return
        sys.path.insert(0, str(root / "vllm" / "third_party"))
        import deep_gemm

        if library is None:
            raise SystemExit("--upstream needs --top-k-library")
        function = ctypes.CDLL(str(library)).up_topk
        p, n = ctypes.c_void_p, ctypes.c_int64
        function.argtypes, function.restype = [p, p, p, p, n, n, n, ctypes.c_int, p], ctypes.c_int

        def top_k(logits: Any, starts: Any, ends: Any, out: Any, rows: int, s0: int, s1: int, k: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            code = function(*(t.data_ptr() for t in (logits, starts, ends, out)), rows, s0, s1, k, stream)
            assert code == 0, code

        self._logits, self._top_k = deep_gemm.fp8_fp4_mqa_logits, top_k

    def logits(self, case: tuple[torch.Tensor, ...], lo: int, hi: int, longest: int) -> torch.Tensor:
        q, k, scale, weights, ks, ke = case
        return self._logits((q[lo:hi], None), (k, scale), weights[lo:hi], ks[lo:hi], ke[lo:hi], longest)

    def run(
        self, case: tuple[torch.Tensor, ...], out: torch.Tensor, longest: int, slices: list[Slice]
    ) -> None:
        """Score and select slice by slice."""
        q, k, scale, weights, ks, ke = case
        for lo, hi, first, last in slices:
            part = (q, k[first:last], scale[first:last], weights, ks - first, ke - first)
            logits = self.logits(part, lo, hi, longest)
            lengths = ke[lo:hi] - ks[lo:hi]
            zeros = torch.zeros_like(lengths)
            self._top_k(
                logits, zeros, lengths, out[lo:hi], hi - lo, logits.stride(0), logits.stride(1), out.shape[1]
            )


def default_slices(queries: int, keys: int, requests: int) -> list[Slice]:
    """How upstream's planner cuts equal requests by the default budget: whole ones together, or rows."""
    each, width, most = queries // requests, keys // requests, BUDGET // 4
    if each * width > most:
        step = max(1, most // width)
        return [
            (r * each + lo, r * each + min(each, lo + step), r * width, (r + 1) * width)
            for r in range(requests)
            for lo in range(0, each, step)
        ]
    together = next(n for n in range(requests, 0, -1) if n * each * n * width <= most)
    bounds = [*range(0, requests, together), requests]
    return [(a * each, b * each, a * width, b * width) for a, b in itertools.pairwise(bounds)]


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of one call on the GPU."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(AHEAD)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def medians(
    calls: dict[str, Callable[[], Any]], least: int, most: int, budget_s: float
) -> tuple[dict[str, float], int]:
    """Time the calls in turn ``most`` times, or ``least`` once ``budget_s`` is spent, after a warm-up."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    begun, runs = time.monotonic(), 0
    while runs < most and (runs < least or time.monotonic() - begun < budget_s):
        for name, call in calls.items():
            times[name].append(timed(call))
        runs += 1
    return {name: sorted(found)[len(found) // 2] for name, found in times.items()}, runs


def extra_mib(call: Callable[[], Any]) -> float:
    """MiB that a call has allocated at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def deficit(up: Upstream, case: tuple[torch.Tensor, ...], ours: torch.Tensor, longest: int) -> float:
    """Return how far the worst of ours lies below upstream's cut-off / max(1, |cut-off|), in sampled rows."""
    worst = 0.0
    queries = ours.shape[0]
    for lo in sorted({0, queries // 2, max(0, queries - 16)}):
        hi = min(lo + 16, queries)
        logits = up.logits(case, lo, hi, longest)
        lengths = (case[5][lo:hi] - case[4][lo:hi])[:, None]
        inside = torch.arange(logits.shape[1], device=logits.device) < lengths
        logits = torch.where(inside, logits, -torch.inf)
        cut = logits.topk(min(K, logits.shape[1]), 1).values[:, -1]
        ids = ours[lo:hi].long()
        scores = logits.gather(1, ids.clamp(min=0))
        lowest = torch.where(ids >= 0, scores, torch.inf).amin(1)
        long = lengths[:, 0] > K
        below = torch.where(long, (cut - lowest) / cut.abs().clamp(min=1), 0)
        worst = max(worst, float(below.max()))
    return worst


def measure(up: Upstream, shape: Shape, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one shape and return its rows."""
    from dsa.litetopk_cases import make
    from vllm.dsa.litetopk import kernel, plan

    heads, queries, keys, requests, distribution = shape
    if requests == 1:
        case = make(queries, keys, heads, distribution)
        longest = keys
    else:  # equal requests of queries / requests tokens, each with keys / requests keys
        case = make(queries, keys, heads, distribution)
        each, width = queries // requests, keys // requests
        request = torch.arange(queries, device="cuda") // each
        ks = (request * width).int()
        ke = ks + width - each + (torch.arange(queries, device="cuda") % each).int() + 1
        case, longest = (*case[:4], ks, torch.maximum(ks, ke.int())), width
    out, theirs = (torch.full((queries, K), -1, dtype=torch.int32, device="cuda") for _ in range(2))
    how = plan.plan(queries, longest, heads, K, torch.cuda.get_device_properties(0).multi_processor_count)
    workspace = torch.empty(how.workspace, dtype=torch.uint8, device="cuda")

    def ours() -> None:
        kernel.litetopk(*case, out, plan=how, workspace=workspace)

    slices = default_slices(queries, keys, requests)
    calls: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "512MiB": lambda: up.run(case, theirs, longest, slices),
    }
    if len(slices) > 1 and queries * longest * 4 <= args.matrix_gib << 30:
        calls["matrix"] = lambda: up.run(case, theirs, longest, [(0, queries, 0, keys)])
    found, runs = medians(calls, args.least, args.runs, args.seconds)
    if len(slices) == 1:
        found["matrix"] = found["512MiB"]  # the default budget already takes one slice
    below = deficit(up, case, out, longest)
    assert below <= 1e-3, f"{shape}: below upstream's cut-off by {below}"
    name = f"H={heads} K={K} Q={queries} S={keys} B={requests}"
    common = {"runs": runs, **args.about}
    result = [
        {
            "case": f"{name} budget={budget} dist={distribution}",
            "metric": "time",
            "unit": "ms",
            "baseline": found[budget],
            "ours": found["ours"],
            "ratio": found[budget] / found["ours"],
            **common,
        }
        for budget in ("512MiB", "matrix")
        if budget in found
    ]
    theirs_mib, mib = extra_mib(calls["512MiB"]), extra_mib(lambda: kernel.litetopk(*case, out, plan=how))
    peak = {"metric": "peak_MiB", "unit": "MiB", "baseline": theirs_mib, "ours": mib}
    result.append(
        {
            "case": f"{name} budget=512MiB dist={distribution}",
            **peak,
            "ratio": theirs_mib / mib,
            **common,
        }
    )
    lengths = (case[5] - case[4]).double().sum()
    rate = float(lengths) * 2 * heads * 128 / found["ours"] / 1e9
    print(
        f"{name} {distribution}: "
        + " ".join(f"{a} {b:.3f}" for a, b in found.items())
        + f" ms, {rate:.0f} TFLOP/s, below cut-off {below:.1e}, runs {runs}",
        flush=True,
    )
    return result


def matrix() -> list[Shape]:
    """Return the shapes of the RFC's grid that fit one gather, in an order whose beginnings are stratified.

    Of 665 shapes 317 fit the 2^20 keys and 131072 queries of a gather: all lengths of history, the larger
    batches only of the shorter ones. Histories take turns, each with its shapes in a fixed random order, so
    the first 133 hold seven of each. A history of 1M counts the new tokens in: the kernel takes 2^20 keys.
    """
    strata = []
    for history in HISTORY:
        fitting = []
        for length, requests, queries in MATRIX:
            keys = requests * min(length + queries, 1 << 20)
            if length == history and requests * queries <= 1 << 17 and keys <= 1 << 20:
                fitting.append((64, requests * queries, keys, requests, "iid"))
        random.Random(history).shuffle(fitting)
        strata.append(fitting)
    rounds = itertools.zip_longest(*strata)
    return [shape for turn in rounds for shape in turn if shape is not None]


def shapes_of(name: str, count: int) -> list[Shape]:
    """Return the shapes of a set; of the matrix the first ``count``."""
    if name != "matrix":
        return {"table": TABLE, "small": SMALL, "distributions": DISTRIBUTIONS}[name]
    return matrix()[:count]


def case_of(shape: Shape) -> str:
    """The case of a shape's row against the default path."""
    heads, queries, keys, requests, distribution = shape
    return f"H={heads} K={K} Q={queries} S={keys} B={requests} budget=512MiB dist={distribution}"


def stored(path: Path) -> dict[str, float]:
    """Ratio of each case in the file that has a time."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {row["case"]: row["ratio"] for row in rows if row["metric"] == "time"}


def report(shapes: list[Shape], path: Path) -> None:
    """Print how much of the set the file has, its geometric mean and its slowest shapes."""
    found = stored(path)
    ratios = {case: found[case] for case in map(case_of, shapes) if case in found}
    if not ratios:
        return
    mean = statistics.geometric_mean(ratios.values())
    print(f"{len(ratios)} of {len(shapes)} shapes stored, geometric mean {mean:.3f} against 512 MiB")
    for case, ratio in sorted(ratios.items(), key=lambda item: item[1])[:5]:
        print(f"  {ratio:.3f} {case}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--line", required=True)
    sets = ("table", "small", "distributions", "matrix")
    parser.add_argument("--set", default=["table"], nargs="+", choices=sets)
    parser.add_argument("--shapes", type=int, default=133, help="shapes of the matrix to take, at most 317")
    parser.add_argument("--resume", action="store_true", help="leave out shapes that FILE already has")
    parser.add_argument("--matrix-gib", type=int, default=40, help="largest one big matrix that is timed")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--least", type=int, default=1, help="runs that are made however long they take")
    parser.add_argument("--seconds", type=float, default=3.0, help="per shape, for further runs")
    parser.add_argument("--limit", type=float, default=500.0, help="start no shape after so many seconds")
    parser.add_argument("--upstream", type=Path)
    parser.add_argument("--top-k-library", type=Path)
    parser.add_argument("--commit", default="", help="instead of what git says")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begun = time.monotonic()
    out = args.out or ROOT / f"bench/results/litetopk/{args.line}-h200.json"
    args.about = {"line": args.line} | run_info.facts(args.commit)
    up = Upstream(args.upstream, args.top_k_library)
    rows: list[dict[str, Any]] = []
    shapes = [shape for name in args.set for shape in shapes_of(name, args.shapes)]
    known = stored(out) if args.resume else {}
    for shape in shapes:
        if case_of(shape) in known:
            continue
        if time.monotonic() - begun > args.limit:
            print("time is up: the remaining shapes were not measured")
            break
        rows += measure(up, shape, args)
        found = [{key: value for key, value in row.items() if key != "line"} for row in rows]
        results_file.add(out, "litetopk", args.line, found, replace=True)
        torch.cuda.empty_cache()
    report(shapes, out)


if __name__ == "__main__":
    main()
