# SPDX-License-Identifier: Apache-2.0
"""Which build this is: read from the record that the wheel or the applied tree carries."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

RECORD = "_provenance.json"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Build:
    """Identity of this build.

    Attributes:
        line: upstream release that this build is based on, such as ``0.33.0``.
        version: version of the build, such as ``0.33.0+dsa.1``.
        series_version: the ``1`` of ``+dsa.1``.
        upstream_commit: commit of vLLM.
        record: the whole record (of a wheel: patches, kernels, tools), or how the identity was found.
    """

    line: str
    version: str
    series_version: str
    upstream_commit: str
    record: dict[str, Any]


def read(folder: Path | None = None) -> Build:
    """Return the identity of this build; what cannot be found is ``unknown``. Never raises.

    Args:
        folder: where the record lies; default: beside this module.
    """
    path = (folder or Path(__file__).parent) / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        return _from_version({"kind": "source tree"})
    except (OSError, ValueError) as error:
        return _from_version({"kind": UNKNOWN, "error": f"{path.name} cannot be read: {error}"})
    fallback = _from_version(record)

    def text(key: str, default: str) -> str:
        return str(record.get(key) or default)

    return Build(
        line=text("line", fallback.line),
        version=text("version", fallback.version),
        series_version=text("series_version", fallback.series_version),
        upstream_commit=text("upstream_commit", UNKNOWN),
        record=record,
    )


def _from_version(record: dict[str, Any]) -> Build:
    """Take line and series version from vLLM's own version, as far as it says them."""
    try:
        version = str(import_module("vllm.version").__version__)
    except Exception:  # an overlay without vLLM around it
        version = UNKNOWN
    match = re.fullmatch(r"(\d+(?:\.\d+)+)(?:\+dsa\.(\w+))?.*", version)
    return Build(
        line=match[1] if match else UNKNOWN,
        version=version,
        series_version=(match[2] if match else None) or UNKNOWN,
        upstream_commit=UNKNOWN,
        record=record,
    )
