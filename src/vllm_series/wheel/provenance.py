"""``vllm/dsa/_provenance.json``: what a wheel was made from. No times and no paths, so it is reproducible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm_series.errors import CheckFailed
from vllm_series.pins import Artifact
from vllm_series.wheel.recipe import Recipe, overlay_digest

PATH = "vllm/dsa/_provenance.json"
SCHEMA = 1


def _artifact(artifact: Artifact) -> dict[str, Any]:
    return {"filename": artifact.filename, "sha256": artifact.sha256}


def record(recipe: Recipe) -> dict[str, Any]:
    """The provenance of the wheel that ``recipe`` gives."""
    pin = recipe.pin
    overlay = recipe.packaged_overlay
    return {
        "schema": SCHEMA,
        "kind": "wheel",
        "line": pin.line,
        "version": pin.wheel_version,
        "series_version": str(pin.dsa),
        "platform": recipe.platform,
        "upstream_version": pin.version,
        "upstream_commit": pin.source.commit,
        "upstream_sdist": _artifact(pin.source.sdist),
        "upstream_wheel": _artifact(recipe.artifact),
        "torch": pin.torch,
        "base_tree": recipe.base_tree,
        "applied_tree": recipe.applied_tree,
        "patches": [
            {
                "name": patch.name,
                "sha256": patch.sha256,
                "subject": patch.subject,
                "trailers": {key: list(values) for key, values in sorted(patch.trailers.items())},
            }
            for patch in recipe.patches
        ],
        "overlay": {"files": len(overlay), "sha256": overlay_digest(overlay)},
        "kernels": dict(recipe.kernels.record) if recipe.kernels else "none",
        **({"deepgemm": dict(recipe.deepgemm.record)} if recipe.deepgemm else {}),
    }


def render(data: Mapping[str, Any]) -> bytes:
    """The record as JSON bytes."""
    return (json.dumps(data, indent=2, sort_keys=False, ensure_ascii=True) + "\n").encode()


def parse(data: bytes) -> dict[str, Any]:
    """Read a record back.

    Raises:
        CheckFailed: it is not one of ours, or of a newer schema.
    """
    try:
        found = json.loads(data)
    except ValueError as error:
        raise CheckFailed(f"{PATH} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise CheckFailed(
            f"{PATH} has another schema than {SCHEMA}", fix="use the tool that built this wheel"
        )
    return found
