# SPDX-License-Identifier: Apache-2.0
"""Prints how Inductor would launch the compiled line's query packing on an H200: upstream's function, our op.

A script, see test_fused_q_compiled.py; it needs no GPU. One JSON row: the types that Inductor gives the two
factors of upstream's kernel, and the call of our op.
"""

import contextlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))

import torch
import triton
from overlap_compiled_inductor import Driver, generated, made_up_card
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from vllm.dsa.fused_q import compiled
from vllm.model_executor.layers import sparse_attn_indexer as upstream

TOKENS, HEADS = 8, 64


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    platform = SimpleNamespace(is_cuda=lambda: True, fp8_dtype=lambda: torch.float8_e4m3fn)
    upstream.current_platform = compiled.current_platform = platform
    with contextlib.ExitStack() as stack:
        for patch in made_up_card():
            stack.enter_context(patch)
        with FakeTensorMode(shape_env=ShapeEnv()):
            like = {"device": "cuda", "dtype": torch.bfloat16}
            tensors = (
                torch.empty(TOKENS, device="cuda", dtype=torch.int64),
                torch.empty(TOKENS, HEADS, 128, **like),
                torch.empty(4096, 64, device="cuda"),
                torch.empty(TOKENS, HEADS, **like),
            )
        code = {}
        packs = {"upstream": upstream.fused_indexer_q_rope_quant, "ours": compiled.pack_index_q}
        for name, pack in packs.items():
            torch._dynamo.reset()
            code[name] = generated(
                lambda *a, pack=pack: pack(*a, 128**-0.5, 0.125, True), *tensors, whole=True
            )
    types = dict(re.findall(r"'(softmax_scale|head_scale)': '(\w+)'", code["upstream"]))
    (call,) = re.findall(r"torch\.ops\.vllm\.dsa_pack_index_q\S*\(.*\)", code["ours"])
    print(json.dumps({"upstream": types, "ours": call}))


if __name__ == "__main__":
    main()
