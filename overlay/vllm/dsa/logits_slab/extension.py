# SPDX-License-Identifier: Apache-2.0
"""Whether the DeepGEMM that vLLM would import carries the series' patch, told from its files alone.

The engine's main process asks this when it logs the state of all features. It must not import DeepGEMM there:
that would initialise CUDA before vLLM forks its workers.
"""

from __future__ import annotations

import importlib.util
import mmap
from pathlib import Path

#: The op's name, which an extension that has it carries in its text.
OP = "fp8_fp4_mqa_logits_out"

_VENDORED = Path(__file__).parents[2] / "third_party" / "deep_gemm"


def folder() -> Path | None:
    """Return the folder of the DeepGEMM package: an installed one wins, as in ``vllm/utils/deep_gemm.py``."""
    try:
        spec = importlib.util.find_spec("deep_gemm")
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return _VENDORED if (_VENDORED / "__init__.py").is_file() else None


def patched(package: Path | None = None) -> bool:
    """Whether each compiled extension of the package has the op.

    Args:
        package: the package's folder; None for the one vLLM would import.
    """
    package = package or folder()
    files = sorted(package.glob("_C*.so")) if package is not None else []
    return bool(files) and all(_holds(file, OP.encode()) for file in files)


def _holds(file: Path, text: bytes) -> bool:
    with file.open("rb") as stream:
        if stream.seek(0, 2) == 0:
            return False
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return view.find(text) >= 0
