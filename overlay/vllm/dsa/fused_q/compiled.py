# SPDX-License-Identifier: Apache-2.0
"""The indexer's query packing of the compiled line (vLLM 0.28.0): the op ``vllm::dsa_pack_index_q``.

An op and not a traced call of the kernel: only inside an op may the number of tokens decide. Its body takes
either kernel, so the switch may also change while the engine runs; graphs keep what they were captured with.

In a compiled graph Inductor launches upstream's kernel with the two factors of the weights as float64, Triton
alone with float32, which differs in the last bit of some weights. `pack_index_q` knows when it is traced and
says so to the op. Upstream's function, called in the op when the switch is off, has float32 always.
"""

# No `from __future__ import annotations`: the schema is inferred from the annotations.

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor_config
from vllm.dsa import features, switches
from vllm.dsa.fused_q import launch
from vllm.dsa.fused_q.feature import SWITCH, off_reason
from vllm.model_executor.layers.sparse_attn_indexer import fused_indexer_q_rope_quant
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

Pack = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, float, bool],
    tuple[torch.Tensor, torch.Tensor],
]

#: Whether Inductor declares a kernel's Python floats as float64.
INDUCTOR_IN_DOUBLE = bool(getattr(inductor_config, "_use_fp64_for_unbacked_floats", False))


def attach(indexer: Any) -> Pack | None:
    """Return what an indexer calls in place of ``fused_indexer_q_rope_quant``; None leaves it upstream's.

    Called at the end of the constructor of ``Indexer`` unless the switch is off. What it looks at is the same
    on every rank.
    """
    if off_reason() is not None or not current_platform.is_cuda():
        return None  # said at start-up
    if not indexer.use_fused_indexer_q:
        features.report_declined("fused_q", "upstream packs this indexer's query without its fused kernel")
        return None
    return pack_index_q


def pack_index_q(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the op; arguments and result are those of upstream's ``fused_indexer_q_rope_quant``.

    Args:
        positions: [T] int64.
        q: [T, heads, 128] bfloat16, rotary dimensions first.
        cos_sin_cache: [positions, 64]: cosines, then sines.
        weights: [T, heads], a slice of the ``wk_weights_proj`` output.
        softmax_scale: factor of the weights.
        head_scale: another one.
        is_neox: rotated pairs are the halves, else neighbours.

    Returns:
        The FP8 query, a power-of-two scale per row taken out, and the float32 weights with it folded in.
    """
    in_double = INDUCTOR_IN_DOUBLE and torch.compiler.is_compiling()
    packed: tuple[torch.Tensor, torch.Tensor] = torch.ops.vllm.dsa_pack_index_q(
        positions, q, cos_sin_cache, weights, softmax_scale, head_scale, is_neox, in_double
    )
    return packed


def dsa_pack_index_q(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    is_neox: bool,
    in_double: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op's body: our kernel; upstream's if switched off and, where it rounds alike, for few tokens."""
    few = q.shape[0] < launch.MIN_TOKENS_INDEX_Q and not in_double
    if few or switches.get(SWITCH) == "off":
        theirs: tuple[torch.Tensor, torch.Tensor] = fused_indexer_q_rope_quant(
            positions, q, cos_sin_cache, weights, softmax_scale, head_scale, is_neox
        )
        return theirs
    q_fp8, weights_out = _outputs(q, weights)
    launch.launch_index_q(
        *(positions, q, cos_sin_cache, weights, softmax_scale, head_scale, is_neox),
        *(q_fp8, weights_out, in_double),
    )
    launch.report_use()
    return q_fp8, weights_out


def _outputs(q: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(q, dtype=current_platform.fp8_dtype()),
        torch.empty_like(weights, dtype=torch.float32),
    )


def dsa_pack_index_q_fake(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    is_neox: bool,
    in_double: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes, dtypes and strides of the op's outputs."""
    return _outputs(q, weights)


direct_register_custom_op(
    op_name="dsa_pack_index_q",
    op_func=dsa_pack_index_q,
    fake_impl=dsa_pack_index_q_fake,
    tags=(torch.Tag.needs_fixed_stride_order,),
)
