"""A DeepGEMM source of nothing but what a patch touches, made from the patch's own context lines."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from vllm_series.deepgemm.patchfile import DeepGemmPatch

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


def files_before(patch: DeepGemmPatch) -> dict[str, str]:
    """Return the files that the patch changes, as they are before it: its lines at their line numbers, and a
    line of its own for each of the others."""
    files: dict[str, dict[int, str]] = {}
    at, lines = 0, None
    for row in patch.file.read_text().splitlines():
        if row.startswith("--- "):
            lines = None if row == "--- /dev/null" else files.setdefault(row.removeprefix("--- a/"), {})
        elif found := _HUNK.match(row):
            at = int(found[1])
        elif lines is not None and row[:1] in (" ", "-") and at:
            lines[at] = row[1:]
            at += 1
        if row.startswith("diff --git"):
            at = 0
    return {
        name: "".join(f"{known.get(i, f'// line {i}')}\n" for i in range(1, max(known) + 3))
        for name, known in files.items()
    }


def write(patch: DeepGemmPatch, folder: Path, *, whole: bool = False) -> Path:
    """Write the tree; ``whole`` adds the files that a build asks for."""
    for name, text in files_before(patch).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if whole:
        for name in ("csrc/python_api.cpp", "deep_gemm/_C.py", "deep_gemm/__init__.py", "setup.py"):
            if not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(f"{name}\n")
        (folder / "third-party/cutlass/include").mkdir(parents=True)
    return folder


def digest(folder: Path) -> str:
    """One sha256 over names and bytes of all files below a folder."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and ".git" not in file.parts:
            found.update(f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]
