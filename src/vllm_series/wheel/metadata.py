"""Rewrites the files of upstream's wheel that state its version or tags, and nothing else in them."""

from __future__ import annotations

import re

from packaging.version import Version

from vllm_series.errors import IntegrityError
from vllm_series.wheel.names import WheelName


def _once(text: str, pattern: str, new: str, what: str) -> str:
    found = re.findall(pattern, text, flags=re.MULTILINE)
    if len(found) != 1:
        raise IntegrityError(
            f"{what}: expected exactly one line like {pattern!r}, found {len(found)}",
            fix="upstream's build changed: adapt src/vllm_series/wheel/metadata.py",
        )
    return re.sub(pattern, lambda _match: new, text, count=1, flags=re.MULTILINE)


def set_metadata_version(data: bytes, old: str, new: str) -> bytes:
    """METADATA with ``Version: new``; the header must say ``old``.

    Raises:
        IntegrityError: it does not.
    """
    head, gap, body = data.decode("utf-8").partition("\n\n")
    head = _once(head, rf"^Version: {re.escape(old)}$", f"Version: {new}", "METADATA")
    return (head + gap + body).encode("utf-8")


def set_module_version(data: bytes, old: str, new: str) -> bytes:
    """``vllm/_version.py`` with the new version and version tuple; the commit id stays upstream's.

    Raises:
        IntegrityError: it does not state ``old``.
    """
    parsed = Version(new)
    parts: list[int | str] = [*parsed.release]
    if parsed.local:
        parts.append(parsed.local)
    text = data.decode("utf-8")
    text = _once(
        text,
        rf"^__version__ = version = '{re.escape(old)}'$",
        f"__version__ = version = '{new}'",
        "vllm/_version.py",
    )
    text = _once(
        text,
        r"^__version_tuple__ = version_tuple = \(.*\)$",
        f"__version_tuple__ = version_tuple = {tuple(parts)!r}",
        "vllm/_version.py",
    )
    return text.encode("utf-8")


def render_wheel_file(data: bytes, name: WheelName, generator: str) -> bytes:
    """WHEEL with the tags and build tag of the file name and our generator; other fields stay upstream's.

    Upstream's own file says ``linux_x86_64`` under a ``manylinux`` file name; here both agree.
    """
    kept = [
        line
        for line in data.decode("utf-8").splitlines()
        if line and line.partition(":")[0] not in {"Generator", "Tag", "Build"}
    ]
    lines = [*kept[:1], f"Generator: {generator}", *kept[1:]]
    lines += [f"Tag: {tag}" for tag in name.expanded_tags]
    if name.build:
        lines.append(f"Build: {name.build}")
    return ("\n".join(lines) + "\n\n").encode("utf-8")
