# SPDX-License-Identifier: Apache-2.0
"""Prints the code that Inductor makes for an H200, without a GPU: of ``wk``, and up to the indexer.

The latter in ``native``, four times: as the model has it, with equal subexpressions in both branches; with a
region whose result the main branch reads; with a mark that the compiler lost; with the query packed by an op.
"""

import contextlib
import types

import torch
import triton
import triton.language as tl
from overlap_compiled_inductor import (
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    TOKENS,
    Driver,
    generated,
    made_up_card,
    print_wk,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from vllm.dsa.fused_q import compiled  # noqa: F401  (registers its op)
from vllm.dsa.overlap.native import compiler
from vllm.dsa.overlap.native.layer import NativeOverlap

Q_LORA, KV_LORA, ROPE, HEADS = 1536, 512, 64, 16


def norm(x, gain):
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6) * gain).to(torch.bfloat16)


def rotate(x, cache, positions):
    # gather, not cache[positions]: fake CUDA tensors cannot be indexed without CUDA.
    cos, sin = cache.gather(0, positions.unsqueeze(1).expand(-1, ROPE)).chunk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


@triton.jit
def quantise(q, weights, q_fp8, weights_out, WIDTH: tl.constexpr):
    """Stands for ``_fused_indexer_q_rope_quant_kernel``: the model's Triton code, results as arguments."""
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    tl.store(q_fp8 + row * WIDTH + column, tl.load(q + row * WIDTH + column).to(tl.float8e4nv))
    tl.store(weights_out + row, tl.load(weights + row) * 2)


def indexer(hidden_states, q_c, positions, cache, wq_b, wk, with_op):
    q = (q_c @ wq_b).view(-1, INDEX_HEADS, INDEX_DIM)
    k, weights = (hidden_states @ wk).split([INDEX_DIM, INDEX_HEADS], dim=-1)
    k = torch.nn.functional.layer_norm(k, (INDEX_DIM,))
    k_pe, k_nope = k.split([ROPE, INDEX_DIM - ROPE], dim=-1)
    k = torch.cat([rotate(k_pe, cache, positions), k_nope], dim=-1)
    if with_op:
        q_fp8, weights_out = torch.ops.vllm.dsa_pack_index_q(positions, q, cache, weights, 1.0, 1.0, True)
        return q_fp8, k, weights_out
    q_fp8, weights_out = torch.empty_like(q, dtype=torch.float8_e4m3fn), torch.empty_like(weights)
    quantise[(TOKENS * INDEX_HEADS,)](q, weights, q_fp8, weights_out, INDEX_DIM)
    return q_fp8, k, weights_out


def layer(overlap, reads_result: bool, with_op: bool):
    def run(x, residual, gain, q_gain, qkv_a, q_b, positions, cache, wq_b, wk):
        residual = x + residual
        hidden_states = norm(residual, gain)
        q_c, kv = (hidden_states @ qkv_a).split([Q_LORA, KV_LORA + ROPE], dim=-1)
        q_c = norm(q_c, q_gain)
        overlap.start(hidden_states, q_c, positions)
        kv_c, k_pe = kv.split([KV_LORA, ROPE], dim=-1)
        kv_c = torch.nn.functional.layer_norm(kv_c, (KV_LORA,))
        q, k_pe = q_c @ q_b, rotate(k_pe, cache, positions)
        q_fp8, k, weights = overlap.index(indexer, hidden_states, q_c, positions, cache, wq_b, wk, with_op)
        if reads_result:
            q = q + k.narrow(1, 0, 1)
        return residual, hidden_states, q, kv_c, k_pe, q_fp8, k, weights

    return run


def loses_a_mark(graph, options):
    """As if a pass of the compiler had put the product of wk in anew."""
    context = compiler.prepare(graph, options)
    lost = [node for node in graph.graph.nodes if "wk" in str(node.args[1:]) and node.op == "call_function"]
    for node in lost:
        del node.meta["custom"]
    assert lost
    return context


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    with contextlib.ExitStack() as stack:
        for patch in made_up_card():
            stack.enter_context(patch)
        print_wk()
        torch._dynamo.reset()
        linear = types.SimpleNamespace(weight=torch.empty(INDEX_DIM + INDEX_HEADS, HIDDEN))
        overlap = NativeOverlap("model.layers.0.self_attn.dsa_overlap", linear, None, "attention")
        with FakeTensorMode(shape_env=ShapeEnv()):

            def of(*shape):
                return torch.empty(*shape, device="cuda", dtype=torch.bfloat16)

            inputs = (
                *(of(TOKENS, HIDDEN), of(TOKENS, HIDDEN), of(HIDDEN), of(Q_LORA)),
                *(of(HIDDEN, Q_LORA + KV_LORA + ROPE), of(Q_LORA, HEADS * 192)),
                torch.empty(TOKENS, device="cuda", dtype=torch.int64),
                *(of(4096, ROPE), of(Q_LORA, INDEX_HEADS * INDEX_DIM), of(HIDDEN, INDEX_DIM + INDEX_HEADS)),
            )
        for reads_result, prepare, with_op in (
            (False, compiler.prepare, False),
            (True, compiler.prepare, False),
            (False, loses_a_mark, False),
            (False, compiler.prepare, True),
        ):
            print("CODE")
            print(generated(layer(overlap, reads_result, with_op), *inputs, prepare=prepare))
            torch._dynamo.reset()


if __name__ == "__main__":
    main()
