# SPDX-License-Identifier: Apache-2.0
"""Query packing at prefill (feature ``fused_q``). Importing this package imports neither torch nor Triton."""
