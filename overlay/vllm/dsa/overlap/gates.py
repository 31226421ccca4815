# SPDX-License-Identifier: Apache-2.0
"""When nothing may fork, and why. All from host data that every rank has alike.

Each function returns a short reason, or None where the overlap may run. A reason of `config_reason` holds for
the life of the engine, one of `forward_reason` for one forward pass.
"""

from __future__ import annotations

from typing import Any

from vllm.dsa import switches

THRESHOLD = "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD"

#: Reasons of `forward_reason`: counted, never warned about, because every engine meets some of them.
PROFILE_RUN = "profile run"
MICROBATCHES = "microbatches"
PIECEWISE = "PIECEWISE CUDA graph"
BREAKABLE = "breakable CUDA graph capture"
TOO_MANY_TOKENS = "more tokens than the threshold"
NO_TOKENS = "no tokens"


def config_reason(config: Any | None) -> str | None:
    """Why this engine never forks, whatever the layer.

    Args:
        config: a VllmConfig, or None where there is no engine (then only the platform is judged).
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return "needs an NVIDIA GPU"
    if config is None:
        return None
    parallel = config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "prefill context parallelism"
    if getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False):
        return "dual batch overlap"
    if config.lora_config is not None:
        return "LoRA"
    return None


def forward_reason(context: Any, tokens: int) -> str | None:
    """Why this forward pass does not fork.

    Never asks for runtime mode FULL: the V2 model runner captures full graphs with mode NONE.

    Args:
        context: vLLM's ForwardContext of this pass.
        tokens: rows of the layer's input, padding included.
    """
    from vllm.compilation import breakable_cudagraph as breakable
    from vllm.config import CUDAGraphMode

    if context.attn_metadata is None:
        return PROFILE_RUN
    if not isinstance(context.attn_metadata, dict) or context.ubatch_slices is not None:
        return MICROBATCHES
    if context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE:
        return PIECEWISE
    if breakable.BreakableCUDAGraphCapture.is_active():
        return BREAKABLE
    if tokens == 0:
        return NO_TOKENS
    if tokens > int(switches.get(THRESHOLD)):
        return TOO_MANY_TOKENS
    return None


#: Linear kernels of vLLM 0.33.0 that hold no scratch memory that two streams would share: they have none, or
#: take it from the allocator at each call (FlashInfer's block-scaled one), or per stream (cuBLAS). Not among
#: them, for example: FlashInfer's FP4 and per-tensor FP8 products, whose workspace is cached per device, and
#: Marlin, whose locks lie in a buffer of the workspace manager that must be there before it is locked.
PRIVATE_SCRATCH = frozenset(
    {
        "CutlassFP8ScaledMMLinearKernel",
        "CutlassFp8BlockScaledMMKernel",
        "DeepGemmFp8BlockScaledMMKernel",
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        "TritonFP8ScaledMMLinearKernel",
        "TritonFp8BlockScaledMMKernel",
        "PerTensorTorchFP8ScaledMMLinearKernel",
        "RowWiseTorchFP8ScaledMMLinearKernel",
        "ChannelWiseTorchFP8ScaledMMLinearKernel",
        "BlockWiseTorchFP8ScaledMMLinearKernel",
    }
)


def layer_reason(layer: Any) -> str | None:
    """Why this layer never forks.

    ``wk_weights_proj`` is the only linear layer that a side branch runs (upstream never quantises it). All
    others stay on the main stream, so theirs may share scratch memory among themselves; scoring and top-k,
    beside which ``q_b_proj`` runs, take theirs from the allocator or from a buffer that no linear layer uses.

    Args:
        layer: a ``DeepseekV32Attention`` with an indexer, its weights loaded.
    """
    kernel = shared_scratch(layer.indexer.wk_weights_proj)
    if kernel is None:
        return None
    return f"wk_weights_proj runs {kernel}, which may share scratch memory between streams"


def full_reason() -> str | None:
    """Why no layer's indexer may run beside its path to attention (``wk`` may be possible even so)."""
    from vllm.platforms import current_platform

    if current_platform.has_device_capability(100):
        return "on this card upstream packs both queries in one CuTeDSL kernel"
    return None


def shared_scratch(linear: Any) -> str | None:
    """The name of a linear layer's kernel unless it is known to share no scratch memory between streams."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    method = getattr(linear, "quant_method", None)
    if method is None:
        return type(linear).__name__
    if isinstance(method, UnquantizedLinearMethod):
        return None
    held = [*vars(method).values(), *vars(getattr(linear, "scheme", None) or method).values()]
    kernels = {
        type(value).__name__
        for value in held
        if type(value).__module__.startswith("vllm.model_executor.kernels.linear")
    }
    shared = sorted(kernels - PRIVATE_SCRATCH) if kernels else [type(method).__name__]
    return shared[0] if shared else None
