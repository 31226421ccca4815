# SPDX-License-Identifier: Apache-2.0
"""Compares two top-k results as sets, row by row, on the device: for start-up self-checks and tests.

The order of the ids of a top-k is free, so two results are equal when their sets are. The kernel
(csrc/dsa/topk_compare.cu) counts the differences in one pass without sorting or copying to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.dsa import kernels

if TYPE_CHECKING:
    import torch

MAX_K = 2048
#: Meaning of the columns of the result.
ONLY_A, ONLY_B, MALFORMED_A, MALFORMED_B = range(4)

_op: Any = None


def topk_compare(a: torch.Tensor, b: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Count, for each row, in how many ids two top-k lists differ and how often each breaks the format.

    A well-formed list has distinct ids in ``[0, limit)``, all before the first -1, and only -1 after it.

    Args:
        a: int32 ``[rows, k]``, 1 <= k <= 2048; rows may be strided, columns are contiguous.
        b: the same shape, type and device.
        limits: int32 ``[rows]``, contiguous; for example the row's context length.

    Returns:
        int32 ``[rows, 4]``: distinct valid ids only in a, only in b, format errors of a, of b. A format error
        is an id out of range, a valid id after a -1, or a repeated id (an entry that is both of the last two
        counts twice). All four are 0 exactly if both lists are well formed and equal as sets.

    Raises:
        ValueError: an argument is not as described.
        KernelError: CUDA tensors, and the library is missing or does not run there.
    """
    _check(a, b, limits)
    op = _op or register()
    result: torch.Tensor = op(a, b, limits)
    return result


def topk_compare_reference(a: torch.Tensor, b: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Return the same as `topk_compare` with plain PyTorch operations, on any device."""
    import torch

    none = torch.iinfo(torch.int32).max  # never valid: limits are at most this
    sets, malformed = [], []
    for ids in (a, b):
        inside = (ids >= 0) & (ids < limits[:, None])
        ended = (ids == -1).cumsum(1) > 0
        ordered = torch.where(inside, ids, none).sort(1).values
        again = torch.zeros_like(inside)
        again[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != none)
        malformed.append(((ids != -1) & ~inside).sum(1) + (inside & ended).sum(1) + again.sum(1))
        sets.append((ordered, (ordered != none) & ~again))
    only = []
    for (mine, distinct), (other, _) in (sets, sets[::-1]):
        at = torch.searchsorted(other, mine).clamp_(max=other.shape[1] - 1)
        only.append((distinct & (other.gather(1, at) != mine)).sum(1))
    return torch.stack([*only, *malformed], 1).to(torch.int32)


def _check(a: torch.Tensor, b: torch.Tensor, limits: torch.Tensor) -> None:
    import torch

    for name, tensor, dims in (("a", a, 2), ("b", b, 2), ("limits", limits, 1)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"topk_compare: {name} has dtype {tensor.dtype}, expected torch.int32")
        if tensor.dim() != dims:
            raise ValueError(f"topk_compare: {name} has {tensor.dim()} dimensions, expected {dims}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"topk_compare: the last dimension of {name} has stride {tensor.stride(-1)}, not 1"
            )
        if tensor.device != a.device:
            raise ValueError(f"topk_compare: {name} is on {tensor.device}, a is on {a.device}")
    if a.shape != b.shape:
        raise ValueError(f"topk_compare: a is {tuple(a.shape)}, b is {tuple(b.shape)}: shapes must be equal")
    if limits.shape[0] != a.shape[0]:
        raise ValueError(f"topk_compare: limits has {limits.shape[0]} rows, a has {a.shape[0]}")
    if not 1 <= a.shape[1] <= MAX_K:
        raise ValueError(f"topk_compare: k is {a.shape[1]}, expected 1 to {MAX_K}")


def register() -> Any:
    """Register ``torch.ops.dsa.topk_compare`` and return it; torch.compile must not trace this call."""
    global _op
    _op = kernels.register_op(
        "topk_compare(Tensor a, Tensor b, Tensor limits) -> Tensor",
        cuda=_cuda,
        fake=_fake,
        cpu=topk_compare_reference,
    )
    return _op


def _cuda(a: torch.Tensor, b: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    import torch

    library = kernels.load()
    if isinstance(library, str):
        raise kernels.KernelError(library)
    reason = kernels.why_not(torch.cuda.get_device_capability(a.device))
    if reason:
        raise kernels.KernelError(reason)
    p, i32, i64 = kernels.POINTER, kernels.INT32, kernels.INT64
    function = library.function("dsa_topk_compare", p, i64, p, i64, p, i64, i32, p)
    out = a.new_empty((a.shape[0], 4))
    rows, k = a.shape
    lists = (a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0))
    library.launch(function, a.device, *lists, limits.data_ptr(), rows, k, out.data_ptr())
    return out


def _fake(a: torch.Tensor, b: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    return a.new_empty((a.shape[0], 4))
