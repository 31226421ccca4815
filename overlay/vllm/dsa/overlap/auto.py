# SPDX-License-Identifier: Apache-2.0
"""What ``auto`` means: the mode that a stored measurement on this kind of card found best for a token count.

A CUDA graph is captured once for all context lengths, so the choice is by token count and never by context;
an entry holds only what was slower at no measured context. Without an entry ``auto`` acts as ``off``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vllm.dsa import provenance
from vllm.dsa.overlap.mode import Mode

# Lines on which an engine on a card ran `auto` with the tokens and logits of `off`. On 0.28.0 that is without
# Inductor's combo kernels, which round otherwise in another graph. A test demands the stored rows.
CHECKED_IN_ENGINE: frozenset[str] = frozenset({"0.28.0", "0.33.0"})
# Models whose layers call this; other models with an indexer may have as many heads.
MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")
# The line on which one compiled graph serves all batches, those too for which nothing forks.
COMPILED = "0.28.0"
#: `Entry.weights` of FP8 weights in blocks, also upstream's name of that quantisation.
FP8 = "fp8"
NOT_CHECKED = "auto acts as off: measured faster, but not yet run as auto in an engine of this line on a card"


@dataclass(frozen=True)
class Entry:
    """The measured modes of one configuration.

    Attributes:
        line: release line, such as ``0.33.0``.
        card: see `card_slug`.
        heads: attention heads of one rank.
        index_heads: heads of the indexer.
        graph: ``FULL`` if decode runs as full CUDA graphs, else ``NONE``.
        points: (token count, mode value) in rising order of token counts; each was measured.
        weights: see `weights_kind`.
    """

    line: str
    card: str
    heads: int
    index_heads: int
    graph: str
    points: tuple[tuple[int, str], ...]
    weights: str = ""

    def mode(self, tokens: int) -> Mode:
        """The mode for ``tokens``. Between two measured counts both must have chosen it; outside, OFF."""
        below = [mode for count, mode in self.points if count <= tokens]
        above = [mode for count, mode in self.points if count >= tokens]
        if not below or not above:
            return Mode.OFF
        if below[-1] == above[0]:
            return Mode(below[-1])
        # "full" holds "wk": where one neighbour found full best and the other wk, wk is part of both.
        return Mode.WK if {below[-1], above[0]} == {Mode.WK.value, Mode.FULL.value} else Mode.OFF

    def chosen_up_to(self) -> int:
        """The token count up to which every measured one chose a mode other than OFF; 0 if none did."""
        most = 0
        for count, mode in self.points:
            if mode == Mode.OFF.value:
                break
            most = count
        return most


def card_slug(name: str) -> str:
    """The name of a card in bench/results: ``NVIDIA H200`` is ``h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia")).strip("-")


def find(
    line: str, card: str, heads: int, index_heads: int, graph: str, weights: str | None = ""
) -> Entry | None:
    """The stored measurement of exactly this configuration, or None. The arguments are fields of `Entry`."""
    from vllm.dsa.overlap.measured import MEASURED

    key = (line, card, heads, index_heads, graph, weights)
    for entry in MEASURED:
        if (entry.line, entry.card, entry.heads, entry.index_heads, entry.graph, entry.weights) == key:
            return entry
    return None


def weights_kind(config: Any) -> str | None:
    """`Entry.weights` of an engine: empty if unquantised, ``fp8`` in FP8 blocks of 128 x 128 with dynamic
    scales of activations (as the released DeepSeek-V3.2 has them), None if quantised otherwise.

    Args:
        config: a VllmConfig.
    """
    quant = getattr(config, "quant_config", None)
    if quant is None:
        return ""
    blocks = getattr(quant, "weight_block_size", None)
    dynamic = getattr(quant, "activation_scheme", "") == "dynamic"
    named = callable(getattr(quant, "get_name", None)) and quant.get_name() == FP8
    return FP8 if named and dynamic and list(blocks or ()) == [128, 128] else None


def has_card(line: str, card: str) -> bool:
    """Whether anything was measured on this kind of card."""
    from vllm.dsa.overlap.measured import MEASURED

    return any((entry.line, entry.card) == (line, card) for entry in MEASURED)


def unmeasured(config: Any | None) -> str | None:
    """Why an engine like this one may use no stored measurement, whatever its card; None where it may.

    Args:
        config: a VllmConfig, or None where there is no engine.
    """
    from vllm.dsa.overlap.measured import MEASURED

    line = provenance.read().line
    if line not in CHECKED_IN_ENGINE:
        return NOT_CHECKED
    if config is None:
        return None
    if getattr(config, "speculative_config", None) is not None:
        return "auto acts as off: not measured with speculative decoding"
    weights = weights_kind(config)
    if weights != "" and not any((entry.line, entry.weights) == (line, weights) for entry in MEASURED):
        return "auto acts as off: not measured with quantised weights"
    parallel = getattr(config, "parallel_config", None)
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        return "auto acts as off: not measured with decode context parallelism"
    cache = getattr(getattr(config, "cache_config", None), "cache_dtype", "auto")
    if cache not in ("auto", "bfloat16"):
        return f"auto acts as off: not measured with a KV cache of {cache}"
    if getattr(getattr(config, "attention_config", None), "hisparse_config", None) is not None:
        return "auto acts as off: not measured with HiSparse"
    if line == COMPILED and not compiled(config):
        return "auto acts as off: not measured without vLLM's compilation"
    most = decoded_in_graphs(config)
    if line == COMPILED and most > (counted := most_sequences(line)):
        return f"auto acts as off: measured up to {counted} sequences, decode graphs hold up to {most}"
    return None


def compiled(config: Any) -> bool:
    """Whether vLLM compiles the model; also True where the configuration does not tell.

    Args:
        config: a VllmConfig.
    """
    from vllm.config import CompilationMode

    mode = getattr(getattr(config, "compilation_config", None), "mode", None)
    return mode in (None, CompilationMode.VLLM_COMPILE)


def most_sequences(line: str) -> int:
    """The batch up to which all entries of a line chose something but OFF at every measured count."""
    from vllm.dsa.overlap.measured import MEASURED

    return min((entry.chosen_up_to() for entry in MEASURED if entry.line == line), default=0)


def decoded_in_graphs(config: Any) -> int:
    """The most sequences that an engine decodes in one CUDA graph, as far as its configuration tells.

    Args:
        config: a VllmConfig.
    """
    most: int = getattr(getattr(config, "scheduler_config", None), "max_num_seqs", 0)
    captured = getattr(getattr(config, "compilation_config", None), "max_cudagraph_capture_size", None)
    return min(most, captured) if captured else most


def graph_kind(config: Any) -> str:
    """``Entry.graph`` of an engine: whether it captures full CUDA graphs.

    Args:
        config: a VllmConfig.
    """
    return "FULL" if config.compilation_config.cudagraph_mode.has_full_cudagraphs() else "NONE"


def knows(config: Any, line: str, card: str) -> bool:
    """Whether there is a measurement for a model, before its layers are built.

    Args:
        config: a VllmConfig.
        line: release line.
        card: see `card_slug`.
    """
    text = config.model_config.hf_text_config
    if getattr(text, "model_type", "") not in MODEL_TYPES:
        return False
    heads = text.num_attention_heads // config.parallel_config.tensor_parallel_size
    return entry_for(config, line, card, heads, text.index_n_heads) is not None


def entry_for(config: Any, line: str, card: str, heads: int, index_heads: int) -> Entry | None:
    """The stored measurement for layers of an engine, or None.

    Args:
        config: a VllmConfig.
        line: release line.
        card: see `card_slug`.
        heads: attention heads of one rank.
        index_heads: heads of the indexer.
    """
    return find(line, card, heads, index_heads, graph_kind(config), weights_kind(config))


def no_measurement(card: str) -> str:
    """The reason to show where `find` or `has_card` has nothing."""
    return f"auto acts as off: no stored measurement for this configuration on {card or 'this machine'}"
