# SPDX-License-Identifier: Apache-2.0
"""The opaque op at which the side stream of ``native`` forks: ``vllm::dsa_native_start``.

It says that it changes two tensors, as F1's fork does and for the same reason: later readers stay behind it.
"""

# No `from __future__ import annotations`: the schema is inferred from the annotations.

import torch
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op


def dsa_native_start(
    hidden_states: torch.Tensor, q_c: torch.Tensor, positions: torch.Tensor, layer_name: LayerNameType
) -> None:
    """See `NativeOverlap.start`."""
    layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    layer.begin(hidden_states, q_c, positions)


def dsa_native_start_fake(
    hidden_states: torch.Tensor, q_c: torch.Tensor, positions: torch.Tensor, layer_name: LayerNameType
) -> None:
    """Nothing to say: no output."""


direct_register_custom_op(
    op_name="dsa_native_start",
    op_func=dsa_native_start,
    mutates_args=["hidden_states", "q_c"],
    fake_impl=dsa_native_start_fake,
    tags=(torch.Tag.needs_fixed_stride_order,),
)
