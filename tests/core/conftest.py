"""Fixtures of the tests of the tool's core; what they are made of is in ``core_lab``, which tests import."""

from core_lab import (
    _own_environment,
    bare,
    checkout,
    index,
    patched,
    project,
    real,
    real_cache,
    templates,
    two,
)

__all__ = [
    "_own_environment",
    "bare",
    "checkout",
    "index",
    "patched",
    "project",
    "real",
    "real_cache",
    "templates",
    "two",
]
