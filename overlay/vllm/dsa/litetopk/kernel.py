# SPDX-License-Identifier: Apache-2.0
"""Calls the LiteTopK kernel (csrc/dsa/litetopk.cu) on CUDA tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.dsa import kernels
from vllm.dsa.litetopk import plan as planning

if TYPE_CHECKING:
    import torch

CAPABILITY = (9, 0)


def wrong_card(capability: tuple[int, int]) -> str:
    """Return the reason for a card on which the kernel cannot run."""
    return f"the kernel is for compute capability 9.0, this card has {capability[0]}.{capability[1]}"


def why_not(heads: int, dim: int, k: int, capability: tuple[int, int]) -> str:
    """Return why the kernel cannot run for this indexer on such a card, '' if it can."""
    reason = planning.unsupported(heads, dim, k)
    if not reason and tuple(capability) != CAPABILITY:
        reason = wrong_card(capability)
    return reason or kernels.why_not(capability)


def litetopk(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    out: torch.Tensor,
    *,
    max_keys: int | None = None,
    plan: planning.Plan | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Write each query's ``out.shape[1]`` best positions, as `reference.top_positions` has them.

    The scores are its own, in float32: ``k_scale[j] * sum_h weights[i, h] * max(0, q[i, h] . k[j])``.
    The ids of a row come in an order that only the inputs and the plan decide. Nothing waits for the device,
    nothing is allocated if ``workspace`` is given, and the call can be captured into a graph.

    Args:
        q: float8_e4m3fn ``[queries, heads, 128]``, heads 32 or 64; queries may be strided.
        k: float8_e4m3fn ``[keys, 128]``, contiguous.
        k_scale: float32 ``[keys]``, contiguous.
        weights: float32 ``[queries, heads]``; queries may be strided.
        ks: int32 ``[queries]``, first column of each query's range.
        ke: int32 ``[queries]``, one past its last column; ranges are clamped to ``[0, keys]``.
        out: int32 ``[queries, top_k]``; rows may be strided.
        max_keys: upper bound of ``ke - ks``, known on the host, for the default plan; None means ``keys``.
        plan: `planning.plan` of this call; made from the shapes if None.
        workspace: uint8, 256-byte aligned, at least ``plan.workspace`` bytes; its content is scratch.

    Raises:
        ValueError: an argument is not as described.
        KernelError: the library is missing, or does not run on this card.
    """
    _run(q, k, k_scale, weights, ks, ke, out, None, out.shape[1], max_keys, plan, workspace)


def litetopk_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    scores: torch.Tensor,
) -> None:
    """Write the kernel's own scores of all columns in range to float32 ``scores[queries, keys]``; for checks.

    NaN becomes -infinity; columns out of range are left alone. Other arguments and errors as for `litetopk`.
    """
    _run(q, k, k_scale, weights, ks, ke, None, scores, planning.MAX_K, None, None, None)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    out: torch.Tensor | None,
    scores: torch.Tensor | None,
    top_k: int,
    max_keys: int | None,
    plan: planning.Plan | None,
    workspace: torch.Tensor | None,
) -> None:
    import torch

    _check(q, k, k_scale, weights, ks, ke, out, scores)
    queries, heads, dim = q.shape
    reason = why_not(heads, dim, top_k, torch.cuda.get_device_capability(q.device))
    library = kernels.load()
    if reason or isinstance(library, str):
        raise kernels.KernelError(reason or str(library))
    if queries == 0:
        return
    keys = k.shape[0]
    if keys == 0:
        if out is not None:
            out.fill_(-1)
        return
    if plan is None:
        units = torch.cuda.get_device_properties(q.device).multi_processor_count
        plan = planning.plan(queries, max(1, min(max_keys or keys, keys)), heads, top_k, units)
    if workspace is None:
        workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=q.device)
    elif workspace.numel() < plan.workspace or workspace.dtype != torch.uint8 or workspace.device != q.device:
        raise ValueError(
            f"litetopk: workspace must be uint8 on {q.device} with at least {plan.workspace} elements, "
            f"not {workspace.dtype} on {workspace.device} with {workspace.numel()}"
        )
    _function(library)(
        q.device,
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k_scale.data_ptr(),
        weights.data_ptr(),
        weights.stride(0),
        ks.data_ptr(),
        ke.data_ptr(),
        out.data_ptr() if out is not None else None,
        out.stride(0) if out is not None else 0,
        scores.data_ptr() if scores is not None else None,
        queries,
        keys,
        heads,
        top_k,
        plan.whole,
        plan.splits,
        plan.workers,
        plan.segment,
        plan.check_tiles,
        plan.fill_tiles,
        workspace.data_ptr(),
        workspace.numel(),
    )


def _function(library: kernels.Library) -> Any:
    p, i32, i64 = kernels.POINTER, kernels.INT32, kernels.INT64
    inputs = (p, i64, p, p, p, i64, p, p)
    outputs = (p, i64, p)
    sizes = (i64, i64, i32, i32, i32, i32, i32, i32, i32, i32)
    function = library.function("dsa_litetopk", *inputs, *outputs, *sizes, p, i64)
    return lambda device, *arguments: library.launch(function, device, *arguments)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    out: torch.Tensor | None,
    scores: torch.Tensor | None,
) -> None:
    import torch

    queries, heads = q.shape[0], q.shape[1] if q.dim() > 1 else 0
    keys = k.shape[0]
    fp8, f32, i32 = torch.float8_e4m3fn, torch.float32, torch.int32
    expected: list[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]] = [
        ("q", q, fp8, (queries, heads, planning.DIM)),
        ("k", k, fp8, (keys, planning.DIM)),
        ("k_scale", k_scale, f32, (keys,)),
        ("weights", weights, f32, (queries, heads)),
        ("ks", ks, i32, (queries,)),
        ("ke", ke, i32, (queries,)),
    ]
    if out is not None:
        expected.append(("out", out, i32, (queries, out.shape[-1])))
    if scores is not None:
        expected.append(("scores", scores, f32, (queries, keys)))
    for name, tensor, dtype, shape in expected:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"litetopk: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}"
            )
        if not tensor.is_cuda or tensor.device != q.device:
            raise ValueError(f"litetopk: {name} is on {tensor.device}, expected one CUDA device for all")
        strided = 1 if name in ("q", "weights", "out") else 0
        inner = tensor[0] if strided and tensor.shape[0] else tensor
        if not inner.is_contiguous():
            what = "within a row" if strided else "as a whole"
            raise ValueError(f"litetopk: {name} must be contiguous {what}, its strides are {tensor.stride()}")
    if keys > planning.MAX_KEYS:
        raise ValueError(f"litetopk: {keys} keys, more than {planning.MAX_KEYS}")
    for name, address in (("q", q.data_ptr()), ("k", k.data_ptr()), ("k_scale", k_scale.data_ptr())):
        if address % 16:
            raise ValueError(f"litetopk: {name} must start at a multiple of 16 bytes")
    if q.stride(0) % 16:
        raise ValueError(f"litetopk: the rows of q must be a multiple of 16 bytes apart, not {q.stride(0)}")
