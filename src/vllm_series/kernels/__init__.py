"""Builds ``vllm/_dsa_C.so``, the kernels of the overlay, with a pinned nvcc, and checks the result."""

from vllm_series.kernels.build import KernelBuild, build
from vllm_series.kernels.inspect import LibraryFacts, check, inspect

__all__ = ["KernelBuild", "LibraryFacts", "build", "check", "inspect"]
