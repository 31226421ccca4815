# SPDX-License-Identifier: Apache-2.0
"""Inputs, byte counts and kernel loading shared by the fused_q benchmark and its GPU check."""

from __future__ import annotations

import ast
import importlib.util
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decode_engine
import torch

ROOT = Path(__file__).resolve().parents[1]
FP8 = torch.float8_e4m3fn
NOPE, ROPE, INDEX_DIM, MAX_POS = 512, 64, 128, 163840


@dataclass(frozen=True)
class Shape:
    heads: int
    index: int
    interleave: bool
    fp8_query: bool = False
    has_indexer: bool = True
    cache_dtype: torch.dtype = torch.float32

    def bytes(self, tokens: int) -> int:
        """Fewest bytes one call must move: every input element read once, every output written once."""
        per_token = 8 + ROPE * self.cache_dtype.itemsize
        pe = self.heads * ROPE
        per_token += pe * (2 + 1) + self.heads * NOPE * (2 + 1) if self.fp8_query else pe * (2 + 2)
        if self.has_indexer:
            per_token += ROPE * self.cache_dtype.itemsize
            per_token += self.index * (INDEX_DIM * (2 + 1) + 2 + 4)
        return tokens * per_token


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_kernels(upstream: Path | None) -> tuple[Any, Any]:
    """Return (upstream's kernels module, our launch module).

    Without a path both come from the installed vLLM; 0.28.0's models do not use that module: None. With
    one, ``kernels.py`` of the pinned tree runs on this machine's own torch and Triton, with stand-ins for
    the few vLLM names that it imports.
    """
    if upstream is None:
        from vllm.dsa.fused_q import launch

        if decode_engine.compiled_line():
            return None, launch
        from vllm.models.deepseek_v32.common import kernels

        return kernels, launch
    import triton
    import triton.language as tl

    def module(name: str, **names: Any) -> types.ModuleType:
        mod = types.ModuleType(name)
        mod.__path__ = []  # type: ignore[attr-defined]
        mod.__dict__.update(names)
        sys.modules[name] = mod
        return mod

    platform = types.SimpleNamespace(
        fp8_dtype=lambda: FP8,
        is_cuda=lambda: False,  # keeps upstream from probing its CuTeDSL kernel, which is for SM100
        is_arch_support_pdl=lambda: torch.cuda.get_device_capability()[0] >= 9,
    )

    @triton.jit
    def pack_ue8m0_x4(scale):
        return scale

    for name in ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        module(name)
    module("vllm.platforms", current_platform=platform)
    module("vllm.triton_utils", tl=tl, triton=triton)
    module("vllm.utils.deep_gemm", mqa_logits_use_mx_scales=lambda: False)
    module("vllm.v1.attention.ops.common", pack_ue8m0_x4=pack_ue8m0_x4)
    module("vllm.v1.kv_cache_interface", is_quantized_kv_cache=lambda dtype: dtype.startswith("fp8"))
    module("vllm.dsa", features=None)  # only where it decides, which is not measured
    module("vllm.dsa.fused_q")
    kernels = _load("upstream_kernels", upstream)
    ours = ROOT / "overlay/vllm/dsa/fused_q"
    _load("vllm.dsa.fused_q.kernel", ours / "kernel.py")
    _load("vllm.dsa.fused_q.index_kernel", ours / "index_kernel.py")
    return kernels, _load("vllm.dsa.fused_q.launch", ours / "launch.py")


def cos_sin_cache(dtype: torch.dtype) -> torch.Tensor:
    inv = 1.0 / (10000.0 ** (torch.arange(0, ROPE, 2, device="cuda").float() / ROPE))
    angle = torch.arange(MAX_POS, device="cuda").float()[:, None] * inv[None]
    return torch.cat([angle.cos(), angle.sin()], dim=-1).to(dtype)


def make_inputs(shape: Shape, tokens: int, caches: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """The tensors as the model passes them: ``q_pe`` a slice of the q_b output, ``ql_nope`` a transposed bmm
    result, the weights a slice of the wk_weights_proj output."""
    q = torch.randn(tokens, shape.heads, 128 + ROPE, device="cuda", dtype=torch.bfloat16)
    bmm = (
        torch.randn(shape.heads, tokens, NOPE, device="cuda", dtype=torch.bfloat16)
        if shape.fp8_query
        else None
    )
    index_q = kw = None
    if shape.has_indexer:
        index_q = torch.randn(tokens, shape.index, INDEX_DIM, device="cuda", dtype=torch.bfloat16)
        kw = torch.randn(tokens, INDEX_DIM + shape.index, device="cuda", dtype=torch.bfloat16)
    return {
        "positions": torch.randint(0, MAX_POS, (1,), device="cuda")
        .add(torch.arange(tokens, device="cuda"))
        .remainder(MAX_POS),
        "q_pe": q[..., 128:],
        "q_pe_cos_sin_cache": caches[0],
        "index_q": index_q,
        "index_q_cos_sin_cache": caches[1] if shape.has_indexer else None,
        "ql_nope": bmm.transpose(0, 1) if bmm is not None else q[..., :128],
        "q_scale": torch.tensor([0.37], device="cuda"),
        "index_weights": kw[:, INDEX_DIM:] if kw is not None else None,
        "index_weights_softmax_scale": INDEX_DIM**-0.5,
        "index_weights_head_scale": shape.index**-0.5,
    }


def call_upstream(kernels: Any, shape: Shape, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return kernels.fused_q(
        **inputs,
        has_indexer=shape.has_indexer,
        index_rope_interleave=shape.interleave,
        quantize_mqa=shape.fp8_query,
    )


def poisoned_outputs(shape: Shape, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Output buffers of upstream's shapes, every byte 0x7f (NaN in each of the types)."""
    tokens = inputs["positions"].shape[0]

    def buffer(dtype: torch.dtype, *size: int) -> torch.Tensor:
        out = torch.empty(*size, dtype=dtype, device="cuda")
        out.view(torch.uint8).fill_(0x7F)
        return out

    index = (shape.index, INDEX_DIM) if shape.has_indexer else (1, 1)
    rows = tokens if shape.has_indexer else 1
    mqa = (
        buffer(FP8, tokens, shape.heads, NOPE + ROPE)
        if shape.fp8_query
        else buffer(torch.bfloat16, tokens, shape.heads, ROPE)
    )
    return buffer(FP8, rows, *index), buffer(torch.float32, rows, index[0]), mqa


def call_ours(
    launch: Any, shape: Shape, inputs: dict[str, Any], outputs: tuple[torch.Tensor, ...], **meta: Any
) -> tuple[torch.Tensor, ...]:
    index_q_fp8, weights_out, mqa_q = outputs
    args = dict(inputs)
    if not shape.has_indexer:
        args["index_q"] = mqa_q[:1, :1, :1]
        args["index_q_cos_sin_cache"] = args["q_pe_cos_sin_cache"]
        args["index_weights"] = weights_out
    launch.launch(
        **args,
        index_q_fp8=index_q_fp8,
        index_weights_out=weights_out,
        mqa_q=mqa_q,
        has_indexer=shape.has_indexer,
        index_rope_interleave=shape.interleave,
        quantize_mqa=shape.fp8_query,
        use_pdl=True,
        **meta,
    )
    return outputs


def extract_kernel(path: Path, name: str) -> Any:
    """One Triton kernel out of a file that cannot be imported here."""
    source = path.read_text()
    node = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
    head = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
    body = f"{head}{ast.get_source_segment(source, node)}\n"
    file = Path(tempfile.mkdtemp()) / f"{name}.py"
    file.write_text(body)
    return getattr(_load(name, file), name)


def call_upstream_0_28(
    kernel: Any, shape: Shape, inputs: dict[str, Any], out: tuple[torch.Tensor, ...]
) -> None:
    """0.28.0's kernel, launched as ``fused_indexer_q_rope_quant`` of that release does."""
    q, w, cache = inputs["index_q"], inputs["index_weights"], inputs["index_q_cos_sin_cache"]
    strides = [out[0].stride(0), out[0].stride(1)], [out[1].stride(0), out[1].stride(1)]
    kernel[(q.shape[0], q.shape[1])](
        inputs["positions"],
        q,
        q.stride(0),
        q.stride(1),
        cache,
        cache.stride(0),
        out[0],
        *strides[0],
        w,
        w.stride(0),
        w.stride(1),
        out[1],
        *strides[1],
        inputs["index_weights_softmax_scale"],
        inputs["index_weights_head_scale"],
        fp8_min=-448.0,
        fp8_max=448.0,
        is_neox=not shape.interleave,
        num_warps=1,
    )


def call_ours_0_28(
    launch: Any, shape: Shape, inputs: dict[str, Any], out: tuple[torch.Tensor, ...], double: bool = False
) -> None:
    launch.launch_index_q(
        inputs["positions"],
        inputs["index_q"],
        inputs["index_q_cos_sin_cache"],
        inputs["index_weights"],
        inputs["index_weights_softmax_scale"],
        inputs["index_weights_head_scale"],
        not shape.interleave,
        out[0],
        out[1],
        double,
    )
