"""The overlay: files that upstream does not have, laid into the tree of every line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_series.errors import CheckFailed
from vllm_series.files import blob_id
from vllm_series.git import Git
from vllm_series.workspace import Workspace

# Where overlay files may lie. Export tells overlay edits from upstream edits by these folders.
ROOTS = ("vllm/dsa/", "csrc/dsa/", "tests/dsa/")
_SKIP_FOLDERS = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints", ".git"}
_SKIP_SUFFIXES = (".pyc", ".pyo", ".so", ".o", ".swp", ".orig", ".rej", ".tmp", "~")


def is_overlay(path: str) -> bool:
    """Say whether a path of the vLLM tree belongs to the overlay."""
    return path.startswith(ROOTS)


def is_junk(path: str) -> bool:
    """Say whether a path is a by-product (caches, compiled or editor files) that is never laid into a
    tree."""
    parts = path.split("/")
    return not _SKIP_FOLDERS.isdisjoint(parts) or path.endswith(_SKIP_SUFFIXES) or parts[-1] == ".DS_Store"


def overlay_files(ws: Workspace) -> dict[str, Path]:
    """Return ``{path in the vLLM tree: file}``, sorted by path.

    Raises:
        CheckFailed: a file lies outside ``ROOTS`` or is a link.
    """
    found: dict[str, Path] = {}
    for file in sorted(ws.overlay.rglob("*")):
        path = file.relative_to(ws.overlay).as_posix()
        if is_junk(path) or (file.is_dir() and not file.is_symlink()):
            continue
        if file.is_symlink() or not file.is_file():
            raise CheckFailed(
                f"overlay/{path} is not an ordinary file", fix="replace it with a copy of its target"
            )
        if not is_overlay(path):
            if path.count("/") == 0:
                continue  # notes such as overlay/README.md are not laid into trees
            raise CheckFailed(
                f"overlay/{path} lies outside of {', '.join(ROOTS)}", fix="move it into one of these folders"
            )
        found[path] = file
    return found


def entries(ws: Workspace) -> dict[str, tuple[str, str]]:
    """Return ``{path: (git mode, blob id)}`` of the overlay on disk."""
    return {path: (mode_of(file), blob_id(file.read_bytes())) for path, file in overlay_files(ws).items()}


def mode_of(file: Path) -> str:
    return "100755" if file.stat().st_mode & 0o100 else "100644"


def shadowed(paths: Iterable[str], tree: Iterable[str]) -> dict[str, str]:
    """Return ``{overlay path: path of the tree that it would hide}``.

    A path hides an equal one, one that differs in case alone (file systems that do not tell them apart),
    and a file
    where it needs a folder or the reverse.
    """
    known: dict[str, str] = {}
    for path in tree:
        folded = path.lower()
        known.setdefault(folded, path)
        while "/" in folded:
            folded = folded.rsplit("/", 1)[0]
            known.setdefault(folded, path)
    files = {path.lower(): path for path in tree}
    found: dict[str, str] = {}
    for path in paths:
        folded = path.lower()
        if folded in known:
            found[path] = known[folded]
        while "/" in folded:
            folded = folded.rsplit("/", 1)[0]
            if folded in files:
                found[path] = files[folded]
    return found


def check_shadow(paths: Iterable[str], tree: Iterable[str], where: str) -> None:
    """Refuse an overlay that hides files of upstream or of the patches.

    Raises:
        CheckFailed: it does.
    """
    hidden = shadowed(paths, list(tree))
    if hidden:
        rows = "; ".join(f"overlay/{path} hides {other}" for path, other in sorted(hidden.items()))
        raise CheckFailed(
            f"the overlay must not shadow files of {where}: {rows}",
            fix="give the file another name; change an upstream file by a patch instead",
        )


def store(git: Git, files: Mapping[str, Path]) -> dict[str, tuple[str, str]]:
    """Write the overlay's files into an object store; return ``{path: (mode, blob id)}``."""
    order = list(files)
    listing = "".join(f"{files[path]}\n" for path in order).encode()
    blobs = git.lines("hash-object", "-w", "--no-filters", "--stdin-paths", data=listing) if order else []
    return {path: (mode_of(files[path]), blob) for path, blob in zip(order, blobs, strict=True)}
