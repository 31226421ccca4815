# SPDX-License-Identifier: Apache-2.0
"""The opaque ops of F1: ``vllm::dsa_wk_fork`` and ``vllm::dsa_wk_join``.

The fork says that it changes its input, though it does not: that alone keeps the QKV-A projection, which
reads the same tensor, behind it, without a copy and without an output that aliases an input.
"""

# No `from __future__ import annotations`: the schema is inferred from the annotations.

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op


def _layer(layer_name: LayerNameType) -> Any:
    return get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]


def dsa_wk_fork(hidden_states: torch.Tensor, width: int, layer_name: LayerNameType) -> None:
    """See `LayerOverlap.fork`."""
    _layer(layer_name).start_wk(hidden_states, width)


def dsa_wk_fork_fake(hidden_states: torch.Tensor, width: int, layer_name: LayerNameType) -> None:
    """Nothing to say: no output."""


def dsa_wk_join(
    hidden_states: torch.Tensor, qkv_lora: torch.Tensor, width: int, layer_name: LayerNameType
) -> torch.Tensor:
    """See `LayerOverlap.join`."""
    out: torch.Tensor = _layer(layer_name).finish_wk(hidden_states)
    return out


def dsa_wk_join_fake(
    hidden_states: torch.Tensor, qkv_lora: torch.Tensor, width: int, layer_name: LayerNameType
) -> torch.Tensor:
    """Shape, dtype and strides of the join's output."""
    return hidden_states.new_empty((hidden_states.shape[0], width))


direct_register_custom_op(
    op_name="dsa_wk_fork",
    op_func=dsa_wk_fork,
    mutates_args=["hidden_states"],
    fake_impl=dsa_wk_fork_fake,
    tags=(torch.Tag.needs_fixed_stride_order,),
)
direct_register_custom_op(
    op_name="dsa_wk_join",
    op_func=dsa_wk_join,
    fake_impl=dsa_wk_join_fake,
    tags=(torch.Tag.needs_fixed_stride_order,),
)
