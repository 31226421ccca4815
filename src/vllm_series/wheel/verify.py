"""Derives a wheel again from the checkout and compares it with a given file, byte by byte."""

from __future__ import annotations

import zipfile
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from vllm_series.errors import CheckFailed, UsageError
from vllm_series.files import sha256_file
from vllm_series.wheel import provenance, repack
from vllm_series.wheel.archive import Source
from vllm_series.wheel.names import WheelName
from vllm_series.wheel.recipe import Recipe

_CHUNK = 1 << 20


class Claim(NamedTuple):
    """What a wheel says of itself: how it has to be built again."""

    line: str
    platform: str
    kernels: bool
    system_nvcc: bool


def claimed(path: Path) -> Claim:
    """Return what the wheel itself says.

    Raises:
        UsageError: there is no such file, or its name is not a wheel's.
        CheckFailed: it is not a wheel of this project.
    """
    if not path.is_file():
        raise UsageError(f"{path} does not exist", fix="name the wheel to verify, for example dist/*.whl")
    name = WheelName.parse(path.name)
    with Source(path) as wheel:
        if provenance.PATH not in wheel.members:
            raise CheckFailed(f"{path.name} has no {provenance.PATH}: it is not a wheel of this series")
        found = provenance.parse(wheel.read(provenance.PATH))
    kernels = found.get("kernels") != "none"
    if kernels != name.has_kernels:
        said = "has" if kernels else "has no"
        raise CheckFailed(
            f"{path.name}: its provenance says that it {said} kernels, its file name says otherwise"
        )
    compiler = found["kernels"].get("nvcc") if isinstance(found.get("kernels"), dict) else None
    system = isinstance(compiler, dict) and compiler.get("source") == "system"
    return Claim(str(found.get("line")), str(found.get("platform")), kernels, system)


def verify(path: Path, recipe: Recipe, scratch: Path) -> str:
    """Compare ``path`` with a fresh derivation of ``recipe``; returns its sha256.

    ``scratch`` is a folder for the derived file, which is removed again.

    Raises:
        CheckFailed: names the first member that differs, and how.
    """
    if path.name != str(recipe.name):
        raise CheckFailed(
            f"{path.name}: this checkout builds {recipe.name}", fix="check out the release that built it"
        )
    with repack.written(scratch / path.name, recipe) as derived:
        actual, expected = sha256_file(path), sha256_file(derived)
        if actual == expected:
            return actual
        difference = first_difference(path, derived)
    raise CheckFailed(
        f"{path.name} is not what this checkout builds: {difference} (sha256 {actual}, expected {expected})",
        fix="build it again with `series wheel`, or check out the release that built it",
    )


def first_difference(path: Path, derived: Path) -> str:
    """Name the first member, in archive order, in which two wheels differ."""
    with Source(path) as ours, Source(derived) as theirs:
        for mine, other in zip_longest(ours.members.values(), theirs.members.values()):
            if mine is None:
                return f"{other.filename} is missing"
            if other is None:
                return f"{mine.filename} is too much"
            if mine.filename != other.filename:
                if mine.filename not in theirs.members:
                    return f"{mine.filename} is too much"
                if other.filename not in ours.members:
                    return f"{other.filename} is missing"
                return f"{mine.filename} comes where {other.filename} is expected"
            if what := _member_difference(ours, mine, theirs, other):
                return f"{mine.filename} {what}"
    return "all members are equal, but the archive around them is not"


def _member_difference(ours: Source, mine: zipfile.ZipInfo, theirs: Source, other: zipfile.ZipInfo) -> str:
    if (mine.CRC, mine.file_size) != (other.CRC, other.file_size):
        return "has other content"
    if mine.compress_type != other.compress_type or mine.compress_size != other.compress_size:
        return "is compressed in another way"
    # Not zip(): pieces are cut alike, and a damaged header must not end the comparison early.
    if b"".join(ours.raw(mine)) != b"".join(theirs.raw(other)):
        return "has other bytes (damaged: its checksum in the archive does not fit any more)"
    header = (mine.date_time, mine.external_attr, mine.flag_bits, mine.extra, mine.create_system)
    if header != (other.date_time, other.external_attr, other.flag_bits, other.extra, other.create_system):
        return "has another date, mode or header field"
    return ""
