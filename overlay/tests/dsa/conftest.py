# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of vllm.dsa; they run in a patched tree, beside upstream's own."""

import logging
from collections.abc import Iterator

import pytest
import vllm.envs as envs

SWITCHES = (
    "VLLM_DSA",
    "VLLM_DISABLE_INDEXER_STREAM",
    "VLLM_INDEXER_OVERLAP",
    "VLLM_LITETOPK",
    "VLLM_LITETOPK_DISPATCH",
    "VLLM_LITETOPK_MIN_KEYS",
    "VLLM_LITEDSA",
    "VLLM_DSA_FUSED_Q",
    "VLLM_INDEXER_LOGITS_SLAB",
)


def configure_logging() -> None:
    """Set vLLM's logging up as its processes do: at start on 0.33.0, by importing vllm.logger on 0.28.0."""
    import vllm.logger

    if hasattr(vllm.logger, "configure_logging"):
        from vllm.config.logging import LoggingConfig

        vllm.logger.configure_logging(LoggingConfig())


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Upstream asks this before it empties a card's memory: seconds per test, for nothing without a card."""
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def caplog_vllm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """Catch vLLM's log lines. Upstream's fixture of this name is not there in the GPU suite."""
    import vllm.logger  # noqa: F401, line 0.28.0 sets the logger up at import

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        yield caplog


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch):
    """Each test starts like a new process with no switch set."""
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("_DSA_METRICS", "")  # set by vllm.dsa.metrics.announce; gone again afterwards
    monkeypatch.delenv("_DSA_METRICS")
    envs.disable_envs_cache()
    from vllm.dsa import counters, features, log

    for module in (features, counters, log):
        module.reset()
    yield
    envs.disable_envs_cache()
    for module in (features, counters, log):
        module.reset()
