# SPDX-License-Identifier: Apache-2.0
"""``vllm.dsa.info()``: this build and the state of its features as one dictionary, and its readable form."""

from __future__ import annotations

import importlib
from typing import Any

from vllm.dsa import counters, features, provenance, switches

SCHEMA = 1


def info(config: Any | None = None) -> dict[str, Any]:
    """Return what this build is and what each feature does in this process. Never raises.

    Args:
        config: the engine's VllmConfig, if there is one; features then also judge model and configuration.

    Returns:
        A dictionary that ``json.dumps`` accepts: ``schema``, ``line``, ``version``, ``series_version``,
        ``upstream_commit``, ``provenance``, ``enabled`` (master switch; None if it cannot be read),
        ``kernels`` (``loaded``, ``reason``) and ``features``: by name ``title``, ``state`` (active, off,
        declined or unavailable), ``reason``, ``switches`` (values) and ``counters`` of this process.
    """
    build = provenance.read()
    try:
        enabled: bool | None = switches.enabled()
    except (ValueError, switches.SwitchesMissing):
        enabled = None
    return {
        "schema": SCHEMA,
        "line": build.line,
        "version": build.version,
        "series_version": build.series_version,
        "upstream_commit": build.upstream_commit,
        "provenance": build.record,
        "enabled": enabled,
        "kernels": _kernels(),
        "features": {known.name: _feature(known, config) for known in features.KNOWN},
    }


def _feature(known: features.Feature, config: Any | None) -> dict[str, Any]:
    status = features.status(known, config)
    try:
        feature = features.load(known)
    except Exception:  # its status says why
        feature = known
    return {
        "title": feature.title,
        "state": str(status.state),
        "reason": status.reason,
        "switches": switches.snapshot(feature.switches),
        "counters": [
            {key: row[key] for key in ("outcome", "reason", "count")} for row in counters.snapshot(known.name)
        ],
    }


def _kernels() -> dict[str, Any]:
    """Ask the kernel loader; it may be missing from the build and its library may not load here."""
    try:
        module = importlib.import_module("vllm.dsa.kernels")
    except ModuleNotFoundError as error:
        reason = features.NOT_IN_RELEASE if error.name == "vllm.dsa.kernels" else str(error)
        return {"loaded": False, "reason": reason}
    except Exception as error:
        return {"loaded": False, "reason": f"{type(error).__name__}: {error}"}
    try:
        found: dict[str, Any] = module.status()
    except Exception as error:
        return {"loaded": False, "reason": f"{type(error).__name__}: {error}"}
    return found


def readable(data: dict[str, Any]) -> str:
    """Return the dictionary of `info` as text for a terminal, one feature per line."""
    kernels = data["kernels"]
    loaded = "loaded" if kernels.get("loaded") else f"not loaded: {kernels.get('reason')}"
    lines = [
        f"vllm.dsa {data['version']}",
        f"  line             {data['line']}",
        f"  series version   {data['series_version']}",
        f"  upstream commit  {data['upstream_commit']}",
        f"  provenance       {data['provenance'].get('kind', 'wheel')}",
        f"  VLLM_DSA         {'cannot be read' if data['enabled'] is None else int(data['enabled'])}",
        f"  kernels          {loaded}",
        "features",
    ]
    for name, row in data["features"].items():
        reason = f" ({row['reason']})" if row["reason"] else ""
        lines.append(f"  {name:<12} {row['state']}{reason}")
        for switch, value in row["switches"].items():
            shown = value["error"] if isinstance(value, dict) else value
            lines.append(f"  {'':<12} {switch} = {shown}")
        for counter in row["counters"]:
            why = f" ({counter['reason']})" if counter["reason"] else ""
            lines.append(f"  {'':<12} {counter['outcome']}{why}: {counter['count']}")
    return "\n".join(lines)
