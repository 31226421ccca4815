# SPDX-License-Identifier: Apache-2.0
"""Reads the switches of this project. They are registered in vllm/envs.py; this is their only reader.

Names, types, defaults and the meaning of every switch stand in ``vllm/envs.py`` (added by the first patch of
each line), which also makes all of them read as off while ``VLLM_DSA=0``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

_envs: ModuleType | None = None


class SwitchesMissing(RuntimeError):
    """This vLLM has no switches of vllm.dsa: its files are here, the patches are not."""


def get(name: str) -> Any:
    """Return the value of a switch at this moment.

    Args:
        name: a variable of ``vllm.envs``, such as ``VLLM_INDEXER_OVERLAP``.

    Raises:
        ValueError: the environment holds a value that is not among the switch's choices.
        SwitchesMissing: this vLLM does not know the switch.
    """
    global _envs
    if _envs is None:
        try:
            _envs = importlib.import_module("vllm.envs")
        except ImportError as error:
            raise SwitchesMissing(f"vllm.envs cannot be imported: {error}") from error
    try:
        return getattr(_envs, name)
    except ValueError as error:
        if name in str(error):
            raise
        raise ValueError(f"{name}: {error}") from error
    except AttributeError:
        raise SwitchesMissing(
            f"vllm.envs has no {name}: the patches of vllm.dsa are not applied to this vLLM"
        ) from None


def enabled() -> bool:
    """Whether the master switch ``VLLM_DSA`` is on. Raises as `get` does."""
    return bool(get("VLLM_DSA"))


def validate(names: Iterable[str]) -> None:
    """Read each switch once, so that a wrong value is an error at start-up. Raises as `get` does."""
    for name in names:
        get(name)


def snapshot(names: Iterable[str]) -> dict[str, Any]:
    """Return the values of the switches; a wrong value gives ``{"error": text}`` instead of an exception."""
    values: dict[str, Any] = {}
    for name in names:
        try:
            values[name] = get(name)
        except (ValueError, SwitchesMissing) as error:
            values[name] = {"error": str(error)}
    return values
