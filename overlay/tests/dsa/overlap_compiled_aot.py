# SPDX-License-Identifier: Apache-2.0
"""Runs the small model under vLLM's own compilation, on a CPU: pieces, Inductor, AOT artifact, reload.

    python overlap_compiled_aot.py MODE...

Prints one JSON object per mode: the outputs, whether they are close to those of the layers without
compilation and overlap, upstream's compilation counters, and what forked. The artifacts are kept in
VLLM_CACHE_ROOT; a second process finds them there. With ``native`` Inductor's code for the CPU enters streams
too, which it does not do by itself.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import overlap_compiled_cases as cases
import torch
from overlap_compiled_streams import Device
from vllm.compilation.counter import compilation_counter
from vllm.compilation.decorators import support_torch_compile
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.dsa import counters
from vllm.dsa.overlap.compiled import attach, runner
from vllm.dsa.overlap.compiled.layer import LayerOverlap
from vllm.dsa.overlap.mode import Mode
from vllm.dsa.overlap.native.stream import INDEX
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as indexer_module


@support_torch_compile
class Compiled(cases.Model):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", mode: str) -> None:
        super().__init__(layers=2)
        self.known = self.registered()
        for layer in self.layers if mode != "off" else ():
            whole = mode == "full"
            name, linear = f"{layer.prefix}.dsa_overlap", layer.indexer.wk_weights_proj
            if mode == "native":
                overlap = attach.make_native(name, linear, "side", layer.mla_attn.layer_name)
            else:
                overlap = LayerOverlap(
                    name, linear, "side", lambda _tokens: Mode(mode), whole=whole, pieces=not whole
                )
            layer.dsa_overlap = self.known[overlap.name] = overlap
            if whole or overlap.native:
                runner.install(layer.indexer.k_cache, layer.mla_attn, overlap)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().forward(positions, x)


def enter_streams() -> None:
    """Let the wrapper enter streams where it does for a GPU; without one it never looks them up."""
    from torch._inductor.codegen.wrapper import EnterCudaStreamContextLine

    def enter(line, code) -> None:
        found = "__import__('torch._dynamo.graph_bytecode_inputs')._dynamo.graph_bytecode_inputs"
        side = f"{found}.get_external_object_by_index({INDEX})"
        code.writeline(f"with {side if line.stream_idx else 'torch._ops.contextlib.nullcontext()'}:")
        code.do_indent()

    EnterCudaStreamContextLine.codegen = enter


def main(modes: list[str]) -> None:
    cases.patch_kernels()
    enter_streams()
    for mode in modes:
        os.environ["VLLM_INDEXER_OVERLAP"] = mode
        counters.reset()
        before = asdict(compilation_counter)
        result = run(mode)
        after = asdict(compilation_counter)
        print("\n" + json.dumps(result | {name: after[name] - before[name] for name in after}))


def run(mode: str) -> dict:
    # It rewrites calls of vLLM's compiled kernels, which are neither here nor in the model.
    FixFunctionalizationPass.__call__ = lambda _self, _graph: None
    device = Device()
    device.install(setattr)
    config = VllmConfig(compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE))
    compilation = config.compilation_config
    # The CPU platform turns vLLM's own compilation off; here it is what is tested.
    compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "inductor"
    compilation.splitting_ops, compilation.compile_sizes = cases.splitting_ops(), []
    outputs, close, batches = [], True, [cases.batch(n, seed=n) for n in (8, 8, 5, 1)]
    with set_current_vllm_config(config), torch.inference_mode():
        model = Compiled(vllm_config=config, mode=mode)
        plain = cases.Model(layers=2)
        indexer_module.dsa_runner = lambda _op, args, kwargs: runner.run(cases.indexer_kernel, args, kwargs)
        for positions, x in batches:
            with override_forward_context(cases.context(plain.registered(), len(x))):
                expected = plain(positions, x)
            with override_forward_context(cases.context(model.known, len(x))):
                out = model(positions, x)
            outputs += out.flatten().tolist()
            close = close and torch.allclose(out, expected, atol=1e-4, rtol=1e-4)
    forked = {row["outcome"]: row["count"] for row in counters.snapshot("overlap")}
    return {"outputs": outputs, "close": close, "forked": forked, "waits": device.log.count(("side", "wait"))}


if __name__ == "__main__":
    main(sys.argv[1:])
