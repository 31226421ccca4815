# SPDX-License-Identifier: Apache-2.0
"""DeepSeek Sparse Attention (DSA) features on top of vLLM.

``vllm.dsa.info()`` says which build this is and what each feature does in this process and why;
``python -m vllm.dsa`` prints it. Importing this package loads no torch and never fails, so that it can be
asked on any machine. With ``VLLM_DSA=0`` vLLM itself never imports it.
"""

from vllm.dsa.report import info

__all__ = ["info"]
