# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine in this process, driven step by step: decode alone, on contexts that were never prefilled.

Time is taken with upstream's DecodeBenchConnector: the scheduler takes all but a request's last token for
computed elsewhere, so a batch of any context decodes at once. The caches are filled with seeded random keys
after the start, each block with its own, because reads of equal blocks would come from the L2 cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import e2e_model

#: Steps before anything is timed or recorded.
WARM = 20


def prompt(tokens: int, seed: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {"prompt_token_ids": rng.choices(range(2, e2e_model.WIDTHS["vocab_size"]), k=tokens)}


def connector() -> dict[str, Any]:
    """Configuration of upstream's connector; its own filling is done once at start, then replaced by ours."""
    extra = {"startup_fill": True, "fill_mean": 0.0, "fill_std": 0.5}
    return {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def keep_our_fill() -> None:
    """Let the connector of 0.28.0 fill nothing.

    It has no ``startup_fill``: it would write over our keys with each request, and cannot draw the bytes of
    the indexer's cache.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as module

    module.DecodeBenchConnectorWorker.start_fill_kv = lambda _self, _metadata: None


@contextlib.contextmanager
def prefilled_for_real() -> Iterator[None]:
    """Let the connector find no context, so that requests are prefilled."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as module

    scheduler = module.DecodeBenchConnectorScheduler
    matched = scheduler.get_num_new_matched_tokens
    scheduler.get_num_new_matched_tokens = lambda _self, _request, _computed: (0, False)
    try:
        yield
    finally:
        scheduler.get_num_new_matched_tokens = matched


def fill_cache(cache: Any, generator: Any) -> str:
    """Fill one layer's cache in place with random keys of deviation 1, and say as what.

    Known layouts: floating point; the indexer's 132 bytes a token (per block all FP8 values, then all float32
    scales); fp8_ds_mla's 656 (512 FP8 values, 4 float32 scales, 64 bfloat16). Anything else is left alone.
    """
    import torch

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=cache.device, generator=generator)

    def quantised(*shape: int) -> torch.Tensor:
        return (normal(*shape) * 64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)

    block, width = cache.shape[1], cache.shape[-1]
    scale = torch.full((1,), 1 / 64, device=cache.device).view(torch.uint8)
    kind = (
        "float" if cache.is_floating_point() else {132: "indexer", 656: "fp8_ds_mla"}.get(width, "left alone")
    )
    rows = max(1, (1 << 24) // (block * width))
    for part in cache.split(rows) if kind != "left alone" else ():
        n = part.shape[0]
        if kind == "float":
            part.copy_(normal(*part.shape))
        elif kind == "indexer":
            scales = scale.repeat(n, block)
            part.copy_(torch.cat((quantised(n, block * 128), scales), -1).view(part.shape))
        else:
            rope = normal(n, block, 64).bfloat16().view(torch.uint8)
            part.copy_(
                torch.cat((quantised(n, block, 512), scale.repeat(n, block, 4), rope), -1).view(part.shape)
            )
    return kind


def fill_caches(model: Any, seed: int = 0) -> dict[str, int]:
    """Fill the caches of all layers and count the layouts met."""
    import torch

    found: dict[str, int] = {}
    for number, (_, module) in enumerate(model.named_modules()):
        cache = getattr(module, "kv_cache", None)
        cache = cache[0] if isinstance(cache, list | tuple) and cache else cache
        if not isinstance(cache, torch.Tensor) or cache.numel() == 0:
            continue
        generator = torch.Generator(device=cache.device).manual_seed(seed + number)
        kind = fill_cache(cache, generator)
        found[kind] = found.get(kind, 0) + 1
    return found


def cache_sums(model: Any) -> dict[str, int]:
    """A sum over the bytes of every layer's cache, by the layer's name."""
    import torch

    found = {}
    for name, module in model.named_modules():
        cache = getattr(module, "kv_cache", None)
        cache = cache[0] if isinstance(cache, list | tuple) and cache else cache
        if isinstance(cache, torch.Tensor) and cache.numel():
            parts = cache.view(torch.uint8).split(max(1, (1 << 28) // cache[0].nbytes))
            found[name] = sum(int(part.sum(dtype=torch.int64)) for part in parts)
    return found


class GraphTimer:
    """GPU time of every replay of a CUDA graph, by events before and after it."""

    def __init__(self) -> None:
        import torch

        self.events: list[tuple[Any, Any]] = []
        self.on = False
        replay = torch.cuda.CUDAGraph.replay

        def timed(graph: Any) -> None:
            if not self.on:
                replay(graph)
                return
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            replay(graph)
            pair[1].record()
            self.events.append(pair)

        torch.cuda.CUDAGraph.replay = timed

    def take(self) -> list[float]:
        """Microseconds of the replays since the last call; waits for them."""
        import torch

        torch.cuda.synchronize()
        events, self.events = self.events, []
        return [first.elapsed_time(last) * 1e3 for first, last in events]


def sort_ids() -> None:
    """Let every top-k be in descending order of ids: the order is free, and attention adds in it."""
    import functools
    import inspect

    def ordered(real: Any) -> Any:
        signature = inspect.signature(inspect.unwrap(real))

        @functools.wraps(real)
        def in_order(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            bound = signature.bind(*args, **kwargs).arguments
            ids = bound["topk_indices_buffer"][: bound["hidden_states"].shape[0], : bound["topk_tokens"]]
            ids.copy_(ids.sort(dim=-1, descending=True).values)
            return result

        return in_order

    if not compiled_line():
        from vllm.models.deepseek_v32 import attention

        attention.sparse_attn_indexer = ordered(attention.sparse_attn_indexer)
        return
    # The op holds upstream's function; what runs it is replaced, with and without overlap.
    from vllm.dsa.overlap.compiled import runner
    from vllm.model_executor.layers import sparse_attn_indexer as module

    run = runner.run
    runner.run = lambda op, args, kwargs: run(ordered(op), args, kwargs)
    module.dsa_runner = lambda op, args, kwargs: ordered(op)(*args, **kwargs)


def compiled_line() -> bool:
    """Whether the installed wheel is of line 0.28.0: other model code, V1 runner."""
    import vllm

    return str(vllm.__version__).startswith("0.28.")


class Engine:
    """One engine.

    Args:
        settings: ``heads``, ``index_heads``, ``layers``, ``max_len``, ``batches`` (captured sizes), ``graph``
            (NONE, PIECEWISE, FULL or FULL_AND_PIECEWISE), ``per_step`` (most tokens of a request and step),
            ``hf`` and ``llm`` (further options).
        filled: contexts by filling the cache; else requests are prefilled as usual.
        ordered: sort the ids of every top-k, so that equal selections give equal bits.
    """

    def __init__(self, settings: dict[str, Any], *, filled: bool, ordered: bool = False) -> None:
        start = time.perf_counter()
        # Random parts in the names of requests would free their slots in another order in each run and rank.
        os.environ.setdefault("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
        self.per_step = settings["per_step"]
        self.timer = GraphTimer()
        self.graph_bytes: list[int] = []
        self.runner: Any = None
        self._prompts: tuple[tuple[int, int], list[dict[str, list[int]]]] = ((0, 0), [])
        if ordered:
            sort_ids()
        self._watch_capture()
        sizes = {batch * tokens for batch in settings["batches"] for tokens in (1, self.per_step)}
        options = {
            "max_num_seqs": max(settings["batches"]),
            "compilation_config": {
                "cudagraph_mode": settings["graph"],
                "cudagraph_capture_sizes": sorted(sizes),
            }
            | ({"inductor_compile_config": settings["inductor"]} if settings.get("inductor") else {}),
        }
        if filled:
            options["kv_transfer_config"] = connector()
            if compiled_line():
                keep_our_fill()
        self.llm = e2e_model.make_engine(
            settings["heads"],
            settings["index_heads"],
            settings["layers"],
            settings["max_len"],
            settings["hf"],
            options | settings["llm"],
        )
        self.caches = self.llm.apply_model(fill_caches)[0] if filled else {}
        if filled and "indexer" not in self.caches:
            raise RuntimeError(f"no indexer cache of a known layout was found: {self.caches}")
        self._logits: list[str] | None = None
        self._rows: list[list[list[int]]] = []
        self.llm.apply_model(self._watch_logits)
        self._requests = 0
        self.start_seconds = time.perf_counter() - start

    def _watch_capture(self) -> None:
        if compiled_line():
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        else:
            from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        capture = GPUModelRunner.capture_model

        def watched(runner: Any, *args: Any, **kwargs: Any) -> Any:
            size = capture(runner, *args, **kwargs)
            self.runner = runner
            if not kwargs.get("profile_only") and isinstance(size, int):
                self.graph_bytes.append(size)
            return size

        GPUModelRunner.capture_model = watched

    def _watch_logits(self, model: Any) -> None:
        compute = model.compute_logits

        def watched(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            logits = compute(hidden_states, *args, **kwargs)
            if self._logits is not None and logits is not None:
                data = logits.float().cpu().numpy()
                spread = float(data.std())
                self._logits.append(f"{hashlib.sha256(data.tobytes()).hexdigest()[:16]} {spread:.3g}")
                rows = hidden_states[: len(data)].float().cpu().numpy()
                self._rows.append([[zlib.crc32(row) for row in part] for part in (rows, data)])
            return logits

        model.compute_logits = watched

    # --- requests

    def _add(self, batch: int, context: int, steps: int) -> None:
        from vllm import SamplingParams

        if self._prompts[0] != (batch, context):
            self._prompts = (batch, context), [prompt(context, context + index) for index in range(batch)]
        params = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True, detokenize=False)
        for made in self._prompts[1]:
            self._requests += 1
            self.llm.llm_engine.add_request(str(self._requests), made, params)

    def _steps(self, count: int) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for _ in range(count):
            for output in self.llm.llm_engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        return tokens

    def _finish(self) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        while self.llm.llm_engine.has_unfinished_requests():
            tokens |= self._steps(1)
        return tokens

    def time(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """Decode a batch and time ``steps`` steps.

        Returns:
            ``graph_us`` (GPU time of the graphs, per step), ``step_us`` (wall, mean of the steps), ``steps``.
        """
        import torch

        self._add(batch, context, (WARM + steps + 8) * self.per_step)
        self._steps(WARM)
        self.timer.take()
        self.timer.on = True
        start = time.perf_counter()
        self._steps(steps)
        torch.cuda.synchronize()
        wall = (time.perf_counter() - start) / steps * 1e6
        self.timer.on = False
        replays = self.timer.take()
        per_step = max(1, round(len(replays) / steps))
        graphs = [sum(replays[i : i + per_step]) for i in range(0, len(replays) - per_step + 1, per_step)]
        self._finish()
        return {"graph_us": graphs, "step_us": wall, "steps": steps, "replays_per_step": per_step}

    def prefill(self, context: int, runs: int) -> list[float]:
        """Prefill one prompt ``runs`` times after two that do not count; milliseconds by the clock."""
        import torch

        taken = []
        with prefilled_for_real():
            for _ in range(runs + 2):
                self._add(1, context, 1)
                torch.cuda.synchronize()
                start = time.perf_counter()
                self._finish()
                torch.cuda.synchronize()
                taken.append((time.perf_counter() - start) * 1e3)
        return taken[2:]

    def profile(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """Decode a batch and profile ``steps`` steps: what `look` and `listing` return."""
        self._add(batch, context, (WARM + steps + 8) * self.per_step)
        self._steps(WARM)
        events = self._profile(steps)
        self._finish()
        return look(events) | {"kernels": listing(events, steps)}

    def _profile(self, steps: int) -> list[dict[str, Any]]:
        import torch
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            self._steps(steps)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            prof.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        return [event for event in events if event.get("cat") == "kernel"]

    def check(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """Prefill and decode for real; hashes of all logits in order, and all tokens.

        Beside them, to find where a difference comes from: of each step the hash of every request's last
        hidden state and logits (``rows``), and at the end a sum over each layer's caches (``caches``).
        """
        self._logits, self._rows = [], []
        self._add(batch, context, steps)
        tokens = self._finish()
        logits, self._logits = self._logits, None
        ordered = [tokens[name] for name in sorted(tokens, key=int)]
        sums = self.llm.apply_model(cache_sums)[0]
        return {"logits": logits, "tokens": ordered, "rows": self._rows, "caches": sums}


def look(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a kernel trace says of the attention blocks.

    A block is what lies between two norms of the residual stream and holds the fused norms of MLA.

    Returns:
        ``blocks`` (their number), ``streams`` (number of streams that ran kernels), if there are blocks
        ``block_us`` (median length), and ``together``: the share of the blocks' time in which two or more
        kernels run, or of the whole trace's where there are none (0.28.0 has no fused norms).
    """
    events = sorted(events, key=lambda event: event["ts"])
    edges = [e for e in events if "norm" in e["name"].lower() and "norm_rope" not in e["name"]]
    spans = set()  # `full` norms in two kernels, both in the same block
    for event in events:
        if "fused_norm_rope" not in event["name"]:
            continue
        before = [e["ts"] + e["dur"] for e in edges if e["ts"] < event["ts"]]
        after = [e["ts"] for e in edges if e["ts"] > event["ts"]]
        if before and after:
            spans.add((max(before), min(after)))
    blocks = sorted(spans)
    inside = [e for e in events if any(a <= e["ts"] < b for a, b in blocks)]
    length = sum(b - a for a, b in blocks)
    found: dict[str, Any] = {"blocks": len(blocks)}
    found["streams"] = len({e.get("args", {}).get("stream") for e in events})
    if blocks:
        found["block_us"] = statistics.median(b - a for a, b in blocks)
        found["together"] = together(inside) / length
    elif events:
        end = max(event["ts"] + event["dur"] for event in events)
        found["together"] = together(events) / (end - events[0]["ts"])
    return found


def listing(events: list[dict[str, Any]], steps: int) -> list[list[Any]]:
    """The kernels of about the last of ``steps`` steps: stream, start, length (us), start of the name."""
    events = sorted(events, key=lambda event: event["ts"])
    last = events[-(len(events) // max(1, steps)) :] if events else []
    return [
        [e.get("args", {}).get("stream"), round(e["ts"] - last[0]["ts"], 2), e["dur"], e["name"][:60]]
        for e in last
    ]


def together(events: list[dict[str, Any]]) -> float:
    """Microseconds in which two or more kernels run."""
    edges = sorted((t, step) for e in events for t, step in ((e["ts"], 1), (e["ts"] + e["dur"], -1)))
    total, running, since = 0.0, 0, 0.0
    for now, step in edges:
        total += now - since if running > 1 else 0.0
        running, since = running + step, now
    return total
