# SPDX-License-Identifier: Apache-2.0
"""What LiteDSA takes and how it groups queries, decided on the host from sizes alone: no torch, no device.

Every rank that sees the same sizes decides the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

#: Rows of the tensor-core tile: heads of a query times queries of a group.
TILE_ROWS = 64
#: Union entries of one step.
TILE_KEYS = 64
HEADS = (8, 16, 32)
QK_DIM = 576
V_DIM = 512
MAX_K = 2048
#: Positions of one request: the union builder keeps one bit for each in shared memory.
MAX_SPAN = 1 << 20
#: Bytes of one row of the ``fp8_ds_mla`` cache: 512 e4m3, 4 float32 scales, 64 bfloat16.
FP8_ROW_BYTES = 656
#: Bytes of union buffers that one pair of launches may use: enough for 16384 tokens in one.
BUFFER_BYTES = 192 << 20
#: Union size over top-k, by heads on a rank, from which on upstream's kernels are as fast: where the faster
#: backend's time crosses ours in bench/results/litedsa/0.33.0-h200.json, the lowest of 4096 to 16384 tokens
#: and of both caches, rounded down. Heads that are not listed are always grouped: ours is faster even where
#: the queries of a group share no key.
BREAK_EVEN: dict[int, float] = {}
#: Groups of a round, one per multiprocessor of an H100 or H200; those of a pair of launches are a multiple.
WAVE = 132


def unsupported(heads: int, qk_dim: int, v_dim: int, k: int) -> str:
    """Return why the kernel does not take this layer at all, '' if it does."""
    if heads not in HEADS:
        return f"{heads} query heads on this rank (the kernel has 8, 16 and 32)"
    if (qk_dim, v_dim) != (QK_DIM, V_DIM):
        return f"head dimensions {qk_dim} and {v_dim} (the kernel has {QK_DIM} and {V_DIM})"
    if not 1 <= k <= MAX_K:
        return f"top-k of {k} (the kernel takes up to {MAX_K})"
    return ""


def group_size(heads: int) -> int:
    """Return how many neighbouring queries share a tile."""
    return TILE_ROWS // heads


def group_starts(bounds: Sequence[int], heads: int, wave: int = 0) -> list[int]:
    """Return the first token of each group and, last, the end of the tokens.

    A group never crosses a bound, so that it never mixes two requests or two chunks of one; the last group of
    each may be smaller.

    A group takes a multiprocessor for a time that grows with its union, and the multiprocessors take groups
    in rounds. Groups that are left for a last, incomplete round are made of fewer queries, as few as give no
    more than ``wave`` groups, if that is at most half: smaller unions, an earlier end. (With more than half
    the round takes longer, as was measured: it gathers more.)

    Args:
        bounds: ascending token offsets: the start of each request's queries (or chunk of them), then the end.
        heads: query heads on this rank.
        wave: groups of a round (`WAVE`); 0: all groups are as large as can be.

    Returns:
        ``groups + 1`` ascending offsets; ``[end]`` if there is no token.

    Raises:
        ValueError: ``bounds`` is empty or descends.
    """
    if not bounds or any(b < a for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"litedsa: bounds of requests must ascend, not {list(bounds)[:9]}")
    size = group_size(heads)
    starts = _cut(bounds, size)
    left = len(starts) % wave if wave else 0
    if left:
        first = starts[-left]
        rest = [first, *(b for b in bounds if b > first)]
        cuts = (_cut(rest, n) for n in range(1, size // 2 + 1))
        starts[-left:] = next((cut for cut in cuts if len(cut) <= wave), starts[-left:])
    return [*starts, bounds[-1]]


def _cut(bounds: Sequence[int], size: int) -> list[int]:
    return [s for a, b in itertools.pairwise(bounds) for s in range(a, b, size)]


def capacity(heads: int, k: int) -> int:
    """Return the entries that a group's union may need, a multiple of 64: no union overflows it."""
    return -(-group_size(heads) * k // TILE_KEYS) * TILE_KEYS


def span_of(longest: int) -> int:
    """Return the positions that the union builder must look at for requests of up to ``longest`` keys."""
    return max(128, -(-longest // 128) * 128)


@dataclass(frozen=True)
class Sizes:
    """Shapes of the buffers between the two kernels, for a number of groups.

    Attributes:
        slots: int32 ``[groups, capacity]``, physical cache rows of the union, then -1.
        masks: int64 ``[groups, capacity / 64, group size]``; bit e of a word: the query takes entry e of the
            tile.
        counts: int32 ``[groups]``, entries of the union.
    """

    slots: tuple[int, int]
    masks: tuple[int, int, int]
    counts: tuple[int]

    @property
    def bytes(self) -> int:
        """All three together."""
        groups, entries = self.slots
        return 4 * groups * entries + 8 * groups * self.masks[1] * self.masks[2] + 4 * groups


def sizes(groups: int, heads: int, k: int) -> Sizes:
    """Return the shapes for ``groups`` groups."""
    entries = capacity(heads, k)
    return Sizes((groups, entries), (groups, entries // TILE_KEYS, group_size(heads)), (groups,))


def groups_at_once(heads: int, k: int) -> int:
    """Return how many groups share one pair of launches, so that their buffers stay within `BUFFER_BYTES`."""
    return max(1, BUFFER_BYTES // sizes(1, heads, k).bytes // WAVE) * WAVE
