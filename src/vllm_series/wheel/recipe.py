"""What decides the bytes of a wheel, as one value: pin, patches, overlay and kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_series.deepgemm.bundle import Bundle
from vllm_series.pins import Artifact, Pin
from vllm_series.wheel.names import WheelName


@dataclass(frozen=True)
class PatchEntry:
    """One patch of the series.

    ``trailers`` keeps repeated keys as lists; ``paths`` are the upstream files that it touches.
    """

    name: str
    sha256: str
    subject: str
    trailers: Mapping[str, list[str]]
    paths: tuple[str, ...]
    text: bytes = b""

    @property
    def source_only(self) -> bool:
        """Whether it says (``Wheel: source-only``) that it only takes effect in a build from source."""
        return any(value.startswith("source-only") for value in self.trailers.get("Wheel", []))


@dataclass(frozen=True)
class Kernels:
    """The compiled library and the record of its toolchain (JSON values, no paths of this machine)."""

    data: bytes
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of a wheel.

    Attributes:
        pin: the upstream release.
        platform: key of ``pin.wheels``.
        upstream_wheel: the pinned wheel on disk, its sha256 checked.
        base_tree: git tree id of the imported upstream source.
        applied_tree: git tree id after the last patch.
        base_blobs: upstream file under ``vllm/`` -> object id in the import.
        read_base: object ids -> their bytes, in the same order.
        changed: upstream file that the patches change -> new bytes, or None where they delete it.
        patches: the series, in order.
        overlay: path in the tree -> bytes, all of the overlay (also what does not go into a wheel).
        kernels: None for a wheel without kernels.
        generator: goes into the file WHEEL.
        deepgemm: built extension that replaces upstream's, or None to keep upstream's.
    """

    pin: Pin
    platform: str
    upstream_wheel: Path
    base_tree: str
    applied_tree: str
    base_blobs: Mapping[str, str]
    read_base: Callable[[list[str]], list[bytes]]
    changed: Mapping[str, bytes | None]
    patches: tuple[PatchEntry, ...]
    overlay: Mapping[str, bytes]
    kernels: Kernels | None
    generator: str
    deepgemm: Bundle | None = None

    @property
    def artifact(self) -> Artifact:
        return self.pin.wheels[self.platform]

    @property
    def upstream_name(self) -> WheelName:
        return WheelName.parse(self.artifact.filename)

    @property
    def name(self) -> WheelName:
        """The file name of our wheel."""
        return self.upstream_name.ours(
            self.pin.wheel_version, kernels=self.kernels is not None, deepgemm=self.deepgemm is not None
        )

    @property
    def packaged_overlay(self) -> dict[str, bytes]:
        """What a wheel carries of the overlay: the Python package, not tests and not CUDA sources."""
        return {path: data for path, data in sorted(self.overlay.items()) if path.startswith("vllm/")}


def overlay_digest(files: Mapping[str, bytes]) -> str:
    """One sha256 over names and bytes of the overlay files that a wheel carries."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path}\0{len(files[path])}\0".encode())
        digest.update(files[path])
    return digest.hexdigest()
