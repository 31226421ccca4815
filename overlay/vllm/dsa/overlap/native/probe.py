# SPDX-License-Identifier: Apache-2.0
"""Whether this engine and this torch are what ``native`` was written for."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import CompilationMode, VllmConfig
from vllm.dsa.overlap import gates

#: The torch whose Inductor was read for this (pinned by the line).
TORCH = "2.13."

#: What of torch is used or relied on beyond its documented interface.
_USED = (
    ("torch._dynamo.graph_bytecode_inputs", "get_external_object_by_index"),
    ("torch._inductor.custom_graph_pass", "CustomSchedulerPass"),
    ("torch._inductor.codegen.wrapper", "EnterDeviceContextManagerWithStreamInfoLine"),
    ("torch._inductor.scheduler", "Scheduler._populate_stream_assignments"),
    ("torch._inductor.scheduler", "Scheduler.compute_ancestors"),
    ("torch._inductor.scheduler", "BaseSchedulerNode.add_fake_dep"),
    ("torch._inductor.graph", "GraphLowering._realize_inputs_at_stream_boundaries"),
    ("torch._inductor.ir", "IRNode.current_stream_idx"),
    ("torch.fx.traceback", "annotate"),
)


def why_not(wrapper: Any, config: VllmConfig) -> str | None:
    """Return why the compiler does not fork in this layer, or None."""
    compilation = config.compilation_config
    if compilation.mode != CompilationMode.VLLM_COMPILE:
        return "native needs vLLM's compilation"
    if compilation.backend != "inductor" or not envs.VLLM_USE_STANDALONE_COMPILE:
        return "native needs Inductor's standalone compile"
    # These two run at the same time.
    for name, linear in (("q_b_proj", wrapper.q_b_proj), ("wq_b", wrapper.indexer.wq_b)):
        kernel = gates.shared_scratch(linear)
        if kernel is not None:
            return f"{name} runs {kernel}, which may share scratch memory between streams"
    return why_not_torch()


def why_not_torch() -> str | None:
    """Return what is different in this torch, or None."""
    if not torch.__version__.startswith(TORCH):
        return f"native was written for torch {TORCH}x, not {torch.__version__}"
    for module, names in _USED:
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name, None)
        if found is None:
            return f"this torch has no {module}.{names}"
    return None
