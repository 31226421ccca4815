"""Collects a recipe from the checkout: pin, upstream's wheel, patched tree in the object store, kernels."""

from __future__ import annotations

import platform as machine
from collections.abc import Iterable
from pathlib import Path

from vllm_series import __version__, deepgemm, importer, kernels, lock, pins, series, stack, state
from vllm_series.errors import IntegrityError, UsageError
from vllm_series.fetch import fetch
from vllm_series.git import Git
from vllm_series.ui import say
from vllm_series.wheel.archive import Source
from vllm_series.wheel.recipe import Kernels, PatchEntry, Recipe
from vllm_series.workspace import Workspace

GENERATOR = f"vllm-series ({__version__})"


def this_platform() -> str:
    """The machine's name as pins spell it."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.machine().lower(), machine.machine().lower())


def read_blobs(git: Git, ids: list[str]) -> list[bytes]:
    """Return the bytes of many objects with one git process.

    Raises:
        IntegrityError: the object store lacks one of them.
    """
    if not ids:
        return []
    data = git.raw("cat-file", "--batch", data="".join(f"{one}\n" for one in ids).encode())
    found: list[bytes] = []
    at = 0
    for one in ids:
        end = data.index(b"\n", at)
        fields = data[at:end].split(b" ")
        if len(fields) != 3 or fields[1] != b"blob":
            raise IntegrityError(
                f"the object store lacks {one}", fix="remove .work/odb.git and run the command again"
            )
        start, size = end + 1, int(fields[2])
        found.append(data[start : start + size])
        at = start + size + 1
    return found


def _warn_of_work(ws: Workspace, pin: pins.Pin) -> None:
    """Say that changes in ``build/LINE`` that were not exported are not in the wheel."""
    found = state.inspect(ws, pin).state
    if found in (state.State.AHEAD, state.State.DIRTY, state.State.PARTIAL):
        say(
            f"note: build/{pin.line} is {found.value}: what is not exported is not in this wheel "
            f"(series export {pin.line})"
        )


def _kernels(
    ws: Workspace, platform: str, wanted: bool, sources: Iterable[Path], system_nvcc: bool
) -> Kernels | None:
    if not wanted:
        return None
    if platform != this_platform():
        say(
            f"note: kernels for {platform} cannot be built on {this_platform()}: this wheel goes without them"
        )
        return None
    built = kernels.build(ws, sources=sources, system_nvcc=system_nvcc)
    return Kernels(built.library.read_bytes(), built.provenance)


def _deepgemm(
    ws: Workspace, pin: pins.Pin, platform: str, folder: Path | None, upstream_wheel: Path
) -> deepgemm.Bundle | None:
    if folder is None:
        return None
    if platform != this_platform():
        raise UsageError(
            f"a DeepGEMM built on {this_platform()} cannot go into a wheel for {platform}",
            fix="leave --deepgemm out, or build on a machine of that kind",
        )
    with Source(upstream_wheel) as source:
        return deepgemm.load(folder, pin.line, deepgemm.patch_of(ws, pin), source.members)


def gather(
    ws: Workspace,
    line: str,
    platform: str,
    *,
    with_kernels: bool,
    system_nvcc: bool = False,
    sources: Iterable[Path] = (),
    deepgemm_folder: Path | None = None,
) -> Recipe:
    """Return the recipe of a line's wheel, fetching and importing what is missing.

    ``system_nvcc`` compiles the kernels with the machine's nvcc instead of the pinned one;
    ``deepgemm_folder`` holds what `series deepgemm build` made, None keeps upstream's DeepGEMM.

    Raises:
        UsageError: unknown line, or no wheel is pinned for the platform.
        IntegrityError: pin, source, LOCK and patches do not agree.
        FetchFailed: the network or the disk did not deliver.
        CheckFailed: the series or the kernels are not valid.
    """
    pin = pins.load_pin(ws, line)
    if platform not in pin.wheels:
        raise UsageError(
            f"line {line} pins no wheel for {platform}; it has: {', '.join(sorted(pin.wheels)) or 'none'}",
            fix="name one of them with --platform",
        )
    if system_nvcc and with_kernels:
        kernels.toolchain.system()  # before anything is fetched: it may not be there
    git = importer.odb(ws)
    _warn_of_work(ws, pin)
    made = stack.current(ws, pin)
    lock.check(ws, made)
    upstream_wheel = fetch(ws, pin.wheels[platform], sources)
    base = git.files(made.base)
    top = git.files(made.top)
    changed_paths = sorted(git.changed(made.base, made.top))
    kept = [path for path in changed_paths if path in top]
    contents = dict(zip(kept, read_blobs(git, [top[path][1] for path in kept]), strict=True))
    overlay_paths = sorted(made.overlay)
    overlay_blobs = read_blobs(git, [made.overlay[path].split(" ")[1] for path in overlay_paths])
    entries = []
    for patch in series.load(ws, line):
        trailers: dict[str, list[str]] = {}
        for key, value in patch.trailers:
            trailers.setdefault(key, []).append(value)
        entries.append(
            PatchEntry(patch.name, patch.sha256, patch.subject, trailers, tuple(patch.paths), patch.data)
        )
    return Recipe(
        pin=pin,
        platform=platform,
        upstream_wheel=upstream_wheel,
        base_tree=git.tree_of(made.base),
        applied_tree=git.tree_of(made.top),
        base_blobs={path: blob for path, (_mode, blob) in base.items() if path.startswith("vllm/")},
        read_base=lambda ids: read_blobs(git, ids),
        changed={path: contents.get(path) for path in changed_paths},
        patches=tuple(entries),
        overlay=dict(zip(overlay_paths, overlay_blobs, strict=True)),
        kernels=_kernels(ws, platform, with_kernels, sources, system_nvcc),
        generator=GENERATOR,
        deepgemm=_deepgemm(ws, pin, platform, deepgemm_folder, upstream_wheel),
    )
