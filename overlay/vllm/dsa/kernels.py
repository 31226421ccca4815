# SPDX-License-Identifier: Apache-2.0
"""Loads ``vllm/_dsa_C.so``, the series' own CUDA kernels, and registers them as ``torch.ops.dsa.*``.

The library is plain C (see csrc/dsa/dsa.h), so that one build serves every torch and both lines; this module
gives it types, the current device and stream, and torch's dispatcher. Importing it loads neither torch nor
the library. A missing, unloadable or foreign library is a reason in words, never an exception: features
decline.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Equal to DSA_ABI_VERSION in csrc/dsa/dsa.h.
ABI_VERSION = 1
NAMESPACE = "dsa"

#: C types for `Library.function`.
POINTER, INT32, INT64, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class KernelError(RuntimeError):
    """A kernel could not be launched; the message is the library's own text for the code."""


class Library:
    """A loaded library whose ABI version fits.

    Attributes:
        path: the file.
        build: its own description, such as ``abi=1;cuda=13.0;arch=sm_90a,sm_100a``.
        capabilities: the compute capabilities it holds code for, such as ``((9, 0), (10, 0))``.
    """

    def __init__(self, path: Path, handle: ctypes.CDLL) -> None:
        self.path = path
        self._handle = handle
        self._functions: dict[str, Callable[..., int]] = {}
        handle.dsa_build_info.restype = ctypes.c_char_p
        handle.dsa_build_info.argtypes = []
        handle.dsa_error_string.restype = ctypes.c_char_p
        handle.dsa_error_string.argtypes = [ctypes.c_int]
        self.build: str = handle.dsa_build_info().decode()
        self.capabilities = tuple(
            (int(major), int(minor)) for major, minor in re.findall(r"sm_(\d+)(\d)[af]?(?![0-9])", self.build)
        )

    def function(self, name: str, *argtypes: Any) -> Callable[..., int]:
        """Return the C function ``name``; it takes ``argtypes`` and, last, the stream, and returns a code.

        Raises:
            KernelError: the library has no such function.
        """
        if name not in self._functions:
            try:
                function = getattr(self._handle, name)
            except AttributeError:
                raise KernelError(f"{self.path.name} has no function {name}") from None
            function.restype = ctypes.c_int
            function.argtypes = [*argtypes, POINTER]
            self._functions[name] = function
        return self._functions[name]

    def error_string(self, code: int) -> str:
        """Return the text of an error code."""
        text: bytes = self._handle.dsa_error_string(code)
        return text.decode(errors="replace")

    def launch(self, function: Callable[..., int], device: torch.device, *arguments: Any) -> None:
        """Call ``function`` with ``device`` current, on torch's current stream of it.

        Raises:
            KernelError: the function did not return 0.
        """
        import torch

        with torch.cuda.device(device):
            code = function(*arguments, torch.cuda.current_stream(device).cuda_stream)
        if code:
            name = getattr(function, "__name__", "kernel")
            raise KernelError(f"{name} failed: {self.error_string(code)} (code {code})")


_lock = threading.Lock()
_loaded: Library | str | None = None
_libraries: dict[str, torch.library.Library] = {}  # one fragment per op, kept alive with the process


def load() -> Library | str:
    """Return the library in the ``vllm`` package, or why there is none. Loads once; never raises."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = open_library(Path(__file__).resolve().parent.parent / "_dsa_C.so")
        return _loaded


def open_library(path: Path) -> Library | str:
    """Load ``path`` and check its ABI version; return the reason if that is not possible."""
    if not path.is_file():
        return f"this build has no kernels ({path.name} is missing)"
    try:
        if not _is_whole(path):
            return f"{path.name} cannot be loaded: the file is cut off, install the wheel again"
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    try:
        version = int(handle.dsa_abi_version())
        if version != ABI_VERSION:
            return f"{path.name} is of another build: its ABI version is {version}, not {ABI_VERSION}"
        return Library(path, handle)
    except (AttributeError, ValueError) as error:
        return f"{path.name} is not a kernel library of this project: {error}"


def _is_whole(path: Path) -> bool:
    """Whether the file is as long as its header says: loading a cut-off library would kill the process."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":  # 64-bit, little-endian
        return False
    (table,) = struct.unpack_from("<Q", header, 40)  # section headers, the last thing in the file
    size, count = struct.unpack_from("<HH", header, 58)
    return bool(table) and table + size * count <= path.stat().st_size


def status() -> dict[str, Any]:
    """Return ``loaded``, ``reason`` ('' if loaded), ``path`` and ``build`` for `vllm.dsa.info()`."""
    found = load()
    if isinstance(found, str):
        return {"loaded": False, "reason": found, "path": None, "build": None}
    return {"loaded": True, "reason": "", "path": str(found.path), "build": found.build}


def why_not(capability: tuple[int, int]) -> str:
    """Return why the kernels cannot run on a card of that compute capability, '' if they can.

    The code is of the architecture-specific kind (sm_90a, sm_100a): it runs on exactly these capabilities.
    """
    found = load()
    if isinstance(found, str):
        return found
    if tuple(capability) not in found.capabilities:
        have = ", ".join(f"{major}.{minor}" for major, minor in found.capabilities)
        mine = f"{capability[0]}.{capability[1]}"
        return f"the kernels are built for compute capability {have}, this card has {mine}"
    return ""


def register_op(
    schema: str,
    *,
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    tags: Sequence[Any] = (),
) -> Any:
    """Register one op in ``torch.ops.dsa``, exactly once per process, and return it.

    Call it when the feature is set up, not in code that torch.compile traces; traced code calls the op.

    Args:
        schema: torch schema without a namespace, such as ``name(Tensor a, Tensor! out) -> ()``.
        cuda: implementation for CUDA tensors; takes pointers and launches through `Library.launch`.
        fake: shapes and dtypes of the results, for torch.compile and graph capture planning.
        cpu: implementation for CPU tensors (the PyTorch reference), if there is one.
        tags: of ``torch.Tag``, such as ``needs_fixed_stride_order``.
    """
    import torch

    name = schema.split("(", 1)[0].strip()
    with _lock:
        if name not in _libraries and not hasattr(getattr(torch.ops, NAMESPACE), name):
            library = torch.library.Library(NAMESPACE, "FRAGMENT")
            library.define(schema, tags=tuple(tags))
            library.impl(name, cuda, "CUDA")
            if cpu is not None:
                library.impl(name, cpu, "CPU")
            torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
            _libraries[name] = library
    return getattr(getattr(torch.ops, NAMESPACE), name)
