# SPDX-License-Identifier: Apache-2.0
"""Dumps inputs and result of the indexer's top-k at prefill, for recall.py. Not run by this project.

    PYTHONPATH=bench/quality python bench/quality/dump_indexer.py --model PATH --prompt FILE --out DIR

Start it once with VLLM_DSA=0 and once with the features on, with the same model, prompt and options. It runs
one prefill eagerly in vLLM's engine and keeps `--rows` queries of each chunk of each layer. In the worker it
puts a recorder around upstream's logits and top-k functions and `vllm.dsa.litetopk.kernel.litetopk`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class Recorder:
    """Keeps the inputs of the last scoring call and writes them with the ids that the top-k call selected."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder, self.rows, self.number = folder, rows, 0
        self.inputs: dict[str, torch.Tensor] | None = None

    def scoring(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap upstream's ``fp8_fp4_mqa_logits((q, _), (k, scale), weights, ks, ke, ...)``."""

        def wrapped(q: Any, kv: Any, weights: Any, ks: Any, ke: Any, *rest: Any, **named: Any) -> Any:
            self.inputs = {"q": q[0], "k": kv[0], "k_scale": kv[1], "weights": weights, "ks": ks, "ke": ke}
            return function(q, kv, weights, ks, ke, *rest, **named)

        return wrapped

    def selecting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap upstream's ``top_k_per_row_prefill(logits, starts, ends, ids, ...)``."""

        def wrapped(logits: Any, starts: Any, ends: Any, ids: torch.Tensor, *rest: Any) -> Any:
            result = function(logits, starts, ends, ids, *rest)
            if self.inputs is not None:
                self.write({**self.inputs, "ids": ids})
                self.inputs = None
            return result

        return wrapped

    def whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ours, which does both: ``litetopk(q, k, k_scale, weights, ks, ke, out, ...)``."""

        def wrapped(*args: Any, **named: Any) -> Any:
            result = function(*args, **named)
            self.write(dict(zip(("q", "k", "k_scale", "weights", "ks", "ke", "ids"), args, strict=False)))
            return result

        return wrapped

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write evenly spaced queries of one call, with all keys."""
        count = len(tensors["ids"])
        chosen = torch.linspace(0, count - 1, min(self.rows, count)).round().long().unique()
        kept = {}
        for name, tensor in tensors.items():
            here = tensor.detach().cpu()
            kept[name] = here.clone() if name in ("k", "k_scale") else here[chosen].clone()
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(kept, self.folder / f"{self.number:05d}.pt")
        self.number += 1


class DumpExtension:
    """Added to vLLM's worker class (``worker_extension_cls``)."""

    def start_dump(self, folder: str, rows: int) -> None:
        """Put the recorder around the functions of this worker; only rank 0 records."""
        from vllm.model_executor.layers import sparse_attn_indexer as upstream

        if getattr(self, "rank", 0):
            return
        recorder = Recorder(Path(folder), rows)
        upstream.fp8_fp4_mqa_logits = recorder.scoring(upstream.fp8_fp4_mqa_logits)
        ops = {name: getattr(upstream.ops, name) for name in dir(upstream.ops) if not name.startswith("__")}
        ops["top_k_per_row_prefill"] = recorder.selecting(ops["top_k_per_row_prefill"])
        upstream.ops = SimpleNamespace(**ops)
        try:
            from vllm.dsa.litetopk import kernel
        except ImportError:
            return
        kernel.litetopk = recorder.whole(kernel.litetopk)


def main() -> None:
    """Run one prefill and dump it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", type=Path, required=True, help="text file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=16, help="queries per chunk and layer")
    parser.add_argument("--llm", type=json.loads, default={}, metavar="JSON", help="arguments for vllm.LLM")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    llm = LLM(args.model, enforce_eager=True, worker_extension_cls="dump_indexer.DumpExtension", **args.llm)
    llm.collective_rpc("start_dump", args=(str(args.out.resolve()), args.rows))
    llm.generate(args.prompt.read_text(encoding="utf-8"), SamplingParams(max_tokens=1, temperature=0))
    print(f"{len(list(args.out.glob('*.pt')))} dumps in {args.out}")


if __name__ == "__main__":
    main()
