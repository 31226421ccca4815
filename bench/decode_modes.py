# SPDX-License-Identifier: Apache-2.0
"""Several modes of the indexer's overlap in one engine of line 0.33.0, each with CUDA graphs of its own.

A mode is read where a layer is built and fixed where a graph is captured. Both are done again here, in a
memory pool of its own for each name, and all graphs stay, so that modes take turns on the same requests,
caches and addresses. Not for line 0.28.0, where torch.compile fixes the mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from late_lane import late_lane


class Modes:
    """The sets of graphs of one engine, by name.

    Args:
        runner: upstream's V2 model runner, started and without requests.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        speculator = getattr(runner, "speculator", None)
        models = [runner.model] + ([] if speculator is None else [speculator.model])
        self.layers = [layer for model in models for layer in overlapped(model)]
        names = ("prefill_cudagraph_manager", "decode_cudagraph_manager")
        drafts = [getattr(speculator, name, None) for name in names]
        self.managers = [manager for manager in (runner.cudagraph_manager, *drafts) if manager is not None]
        if not self.layers:
            raise RuntimeError("no layer of this model calls vllm.dsa.overlap.schedule")
        self._sets: dict[str, tuple[list[Any], list[tuple[dict[Any, Any], dict[Any, Any]]]]] = {}

    def capture(self, name: str, mode: str, late: str = "") -> dict[str, Any]:
        """Build the overlap of all layers for ``mode``, capture all graphs again, and use them.

        Args:
            name: of this set.
            mode: one of ``VLLM_INDEXER_OVERLAP``.
            late: which branch is held up, see `late_lane.LATE`.

        Returns:
            ``graph_MiB`` (memory taken by the capture) and ``forks`` (what the capture decided, by reason).
        """
        import torch
        import vllm.envs as envs
        from vllm.config import set_current_vllm_config
        from vllm.dsa import counters
        from vllm.dsa.overlap.schedule import _side_stream, make_overlap

        os.environ["VLLM_INDEXER_OVERLAP"] = mode
        cached = envs._is_envs_cache_enabled()
        envs.disable_envs_cache()
        overlaps = [make_overlap(layer, self.runner.vllm_config) for layer in self.layers]
        if cached:
            envs.enable_envs_cache()
        if late:
            for overlap in overlaps:
                overlap._lane = late_lane(late, _side_stream())
        self._sets[name] = (overlaps, [({}, {}) for _ in self.managers])
        self.use(name)
        pool = torch.cuda.graph_pool_handle()
        for manager in self.managers:
            manager.pool = pool
            if manager.breakable_cg_runner is not None:
                manager.breakable_cg_runner.graph_pool = pool
        counters.reset()
        with set_current_vllm_config(self.runner.vllm_config):
            size = self.runner.capture_model()
        torch.cuda.synchronize()
        return {"graph_MiB": size / 2**20, "forks": counters.snapshot("overlap")}

    def use(self, name: str) -> None:
        """Let a captured set run from the next step on, its mode in eager passes too."""
        overlaps, kept = self._sets[name]
        for layer, overlap in zip(self.layers, overlaps, strict=True):
            layer._indexer_overlap = overlap
        for manager, (graphs, entries) in zip(self.managers, kept, strict=True):
            manager.graphs = graphs
            if manager.breakable_cg_runner is not None:
                manager.breakable_cg_runner.entries = entries


def overlapped(model: Any) -> Iterator[Any]:
    """The layers of a model that call vllm.dsa.overlap.schedule."""
    return (layer for layer in model.modules() if hasattr(layer, "_indexer_overlap"))
