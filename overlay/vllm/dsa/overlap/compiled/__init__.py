# SPDX-License-Identifier: Apache-2.0
"""Overlap on the line whose DSA models run under torch.compile (vLLM 0.28.0)."""
