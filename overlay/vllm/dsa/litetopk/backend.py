# SPDX-License-Identifier: Apache-2.0
"""The kernel behind one interface, so that another architecture is another class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vllm.dsa.litetopk import kernel, plan, selfcheck

if TYPE_CHECKING:
    import torch


class Backend(Protocol):
    """What the engine needs of a kernel."""

    def why_not(self, heads: int, dim: int, k: int, device: torch.device) -> str:
        """Return why the kernel cannot run for this indexer on this device, '' if it can."""

    def check(self, heads: int, k: int, device: torch.device) -> str:
        """Compare the kernel with the reference on the device; return what is wrong, '' if nothing is."""

    def most_workspace(self, heads: int, k: int, device: torch.device) -> int:
        """Return the most bytes that any call allocates."""

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        k_scale: torch.Tensor,
        weights: torch.Tensor,
        ks: torch.Tensor,
        ke: torch.Tensor,
        out: torch.Tensor,
        longest: int,
    ) -> None:
        """Write each query's best positions to ``out``; arguments as `kernel.litetopk`.

        No range is longer than ``longest``; with several requests ``k`` holds more keys than that.
        """


class Hopper:
    """The CUDA kernel for compute capability 9.0."""

    def why_not(self, heads: int, dim: int, k: int, device: torch.device) -> str:
        """See `Backend.why_not`."""
        import torch
        from vllm.platforms import current_platform

        if device.type != "cuda" or not current_platform.is_cuda():
            return "needs an NVIDIA GPU"
        return kernel.why_not(heads, dim, k, torch.cuda.get_device_capability(device))

    def check(self, heads: int, k: int, device: torch.device) -> str:
        """See `Backend.check`. Waits for the device."""
        return selfcheck.check(device, heads, k)

    def most_workspace(self, heads: int, k: int, device: torch.device) -> int:
        """See `Backend.most_workspace`."""
        import torch

        units = torch.cuda.get_device_properties(device).multi_processor_count
        return plan.most_workspace(heads, k, units)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        k_scale: torch.Tensor,
        weights: torch.Tensor,
        ks: torch.Tensor,
        ke: torch.Tensor,
        out: torch.Tensor,
        longest: int,
    ) -> None:
        """See `Backend.run`. The workspace comes from torch's allocator, on the current stream."""
        kernel.litetopk(q, k, k_scale, weights, ks, ke, out, max_keys=longest)


current: Backend = Hopper()
