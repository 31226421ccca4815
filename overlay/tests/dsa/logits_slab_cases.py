# SPDX-License-Identifier: Apache-2.0
"""A DeepGEMM in plain PyTorch: the layouts, checks and padding of the real kernel, on any device."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.dsa.litetopk.reference import indexer_scores
from vllm.dsa.logits_slab import extension
from vllm.dsa.logits_slab.layout import Layout
from vllm.utils import deep_gemm


class PlainDeepGemm:
    """The module that ``vllm.utils.deep_gemm`` would import.

    Args:
        compressed: layout of the pin (`vllm.dsa.logits_slab.layout`).
        with_out: whether it carries the series' patch.
        fault: what is wrong with its ``_out``: "", "values", "stride" or "outside".
    """

    def __init__(self, compressed: bool, with_out: bool = True, fault: str = "") -> None:
        self.compressed, self.fault, self.calls = compressed, fault, 0
        self._C = SimpleNamespace()
        if with_out:
            self._C.fp8_fp4_mqa_logits_out = self._out if compressed else self._out_full

    def install(self, monkeypatch) -> PlainDeepGemm:
        monkeypatch.setattr(deep_gemm, "_import_deep_gemm", lambda: self)
        monkeypatch.setattr(deep_gemm, "has_deep_gemm", lambda: True)
        monkeypatch.setattr(deep_gemm, "_fp8_fp4_mqa_logits_impl", self.fp8_fp4_mqa_logits)
        monkeypatch.setattr(extension, "patched", lambda: hasattr(self._C, "fp8_fp4_mqa_logits_out"))
        return self

    def fp8_fp4_mqa_logits(self, q, kv, weights, ks, ke, max_seqlen_k=0, clean_logits=True):
        width = max_seqlen_k if self.compressed else kv[0].shape[0]
        rows, stride = Layout(q[0].shape[1], self.compressed).shape(q[0].shape[0], width)
        if self.fault == "stride":
            stride += 256
        return self._fill(torch.empty(rows, stride), q, kv, weights, ks, ke, width)

    def _out(self, q, kv, weights, ks, ke, max_seqlen_k, out):
        self._write(out, q, kv, weights, ks, ke, max_seqlen_k)

    def _out_full(self, q, kv, weights, ks, ke, out, clean_logits=True):
        assert clean_logits is False, "upstream's path never cleans"
        self._write(out, q, kv, weights, ks, ke, kv[0].shape[0])

    def _write(self, out, q, kv, weights, ks, ke, width):
        self.calls += 1
        rows, stride = Layout(q[0].shape[1], self.compressed).shape(q[0].shape[0], width)
        if out.shape[0] < rows or out.shape[1] != stride or not out.is_contiguous() or out.data_ptr() % 512:
            raise RuntimeError(f"`out` must be a contiguous float32 tensor of at least [{rows}, {stride}]")
        self._fill(out, q, kv, weights, ks, ke, width)
        if self.fault == "values":
            out[:, :width] += 1
        if self.fault == "outside":
            torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(0)

    def _fill(self, logits, q, kv, weights, ks, ke, width):
        scores = indexer_scores(q[0].float(), kv[0].float(), kv[1], weights).float()
        logits.fill_(float("nan"))  # what the kernel leaves alone holds anything
        for row, (first, last) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
            at = 0 if self.compressed else first
            logits[row, at : at + last - first] = scores[row, first:last]
        return logits[: q[0].shape[0], :width]


def case(queries: int, keys: int, heads: int, dim: int, seed: int, device: str = "cpu"):
    """Return ``(q, kv, weights, ks, ke)``, ranges of any length among them, some empty."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    bounds = torch.randint(0, keys + 1, (2, queries), generator=generator, device=device, dtype=torch.int32)
    return (
        (normal(queries, heads, dim).to(torch.float8_e4m3fn), None),
        (normal(keys, dim).to(torch.float8_e4m3fn), normal(keys).abs()),
        normal(queries, heads),
        bounds.amin(0).contiguous(),
        bounds.amax(0).contiguous(),
    )


def valid(ks: torch.Tensor, ke: torch.Tensor, width: int, compressed: bool) -> torch.Tensor:
    """Return which logits of ``[queries, width]`` the kernel writes."""
    column = torch.arange(width, device=ks.device)
    first, last = (torch.zeros_like(ks), ke - ks) if compressed else (ks, ke)
    return (column >= first[:, None]) & (column < last[:, None])
