# SPDX-License-Identifier: Apache-2.0
"""How the LiteTopK kernel takes a chunk, decided on the host from sizes alone: no torch, no device.

One block of queries (256 query heads) is one unit of work. When the units do not fill the card evenly, the
key ranges of the last ones are cut into parts, whose results a second kernel merges. Every rank that sees the
same sizes makes the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADS = (32, 64)
DIM = 128
#: Every K up to this runs if it is even; these are the ones that models use.
TESTED_K = (512, 1008, 1024, 2048)
MAX_K = 2048
MAX_KEYS = 1 << 20

_COLUMNS = 256  # query heads of one block
_TILE = 64  # keys of one tile
_WORKERS_PER_MULTIPROCESSOR = {32: 2, 64: 3}  # as csrc/dsa/litetopk_scan.cuh has them
_WARPS = {32: 8, 64: 4}
_SEGMENT = {32: 768, 64: 1536}  # candidates of one warp and query between two cuts, parted among its lanes
_CHECK_TILES = 16
_FILL_TILES = 96
# How many times faster a worker is when only one, two or all of its multiprocessor work.
_SPEED = {32: (1.4, 1.0), 64: (1.5, 1.2, 1.0)}
# Costs in keys of one block: what a part costs beyond its keys, and one more part to merge, for as many
# queries as the card merges at a time.
_PART_COST = 1500
_MERGE_COST = {32: 100, 64: 60}
_MERGES_PER_MULTIPROCESSOR = 2
_MIN_PART = 2048  # keys
_MAX_PARTS = 128


@dataclass(frozen=True)
class Plan:
    """Arguments of ``dsa_litetopk`` that do not change the result, and the workspace that they need.

    Attributes:
        whole: blocks whose key range is not cut, counted in the order of work (the last queries first).
        splits: parts of every other block's key range.
        workers: at most; each multiprocessor has two (32 heads) or three (64).
        segment: candidates that fit between two cuts per warp and query; each of 8 lanes has an eighth.
        check_tiles: tiles between two checks.
        fill_tiles: tiles that are kept whole before the first cut.
        workspace: bytes. Does not grow with the number of queries times the number of keys.
    """

    whole: int
    splits: int
    workers: int
    segment: int
    check_tiles: int
    fill_tiles: int
    workspace: int


def unsupported(heads: int, dim: int, k: int) -> str:
    """Return why the kernel does not take this indexer at all, '' if it does."""
    if heads not in HEADS:
        return f"{heads} index heads (the kernel has 32 and 64)"
    if dim != DIM:
        return f"index head dimension {dim} (the kernel has 128)"
    if not 2 <= k <= MAX_K or k % 2:
        return f"top-k of {k} (the kernel takes even numbers up to {MAX_K})"
    return ""


def plan(queries: int, keys: int, heads: int, k: int, multiprocessors: int) -> Plan:
    """Plan one call.

    Args:
        queries: rows of q, at least 1.
        keys: the longest row's number of keys (an estimate is enough: it affects speed only).
        heads: 32 or 64.
        k: top-k.
        multiprocessors: of the card.

    Raises:
        ValueError: `unsupported` gives a reason, or a size is not positive.
    """
    reason = unsupported(heads, DIM, k)
    if reason or queries < 1 or keys < 1 or multiprocessors < 1:
        sizes = f"{queries} queries, {keys} keys, {multiprocessors} multiprocessors"
        raise ValueError(f"litetopk: cannot plan: {reason or sizes}")
    rows = _COLUMNS // heads
    workers = _WORKERS_PER_MULTIPROCESSOR[heads] * multiprocessors
    blocks = -(-queries // rows)
    whole = blocks // workers * workers
    splits = _parts(blocks - whole, keys, heads, multiprocessors)
    if splits == 1:
        whole = blocks
    segment, check, fill = _SEGMENT[heads], _CHECK_TILES, _FILL_TILES
    workspace = workspace_bytes(queries, heads, k, whole, splits, workers, segment, fill)
    return Plan(whole, splits, workers, segment, check, fill, workspace)


def _parts(blocks: int, keys: int, heads: int, multiprocessors: int) -> int:
    """Return into how many parts the ranges of the ``blocks`` that do not fill the card are best cut."""
    if blocks == 0:
        return 1
    workers = _WORKERS_PER_MULTIPROCESSOR[heads] * multiprocessors
    most = max(1, min(_MAX_PARTS, keys // _MIN_PART, 2 * workers // blocks))
    merges = -(-blocks * (_COLUMNS // heads) // (_MERGES_PER_MULTIPROCESSOR * multiprocessors))

    def cost(parts: int) -> float:
        waves, rest = divmod(blocks * parts, workers)
        last = 1 / _SPEED[heads][-(-rest // multiprocessors) - 1] if rest else 0
        merging = _MERGE_COST[heads] * parts * merges if parts > 1 else 0
        return (waves + last) * (keys / parts + _PART_COST) + merging

    return min(range(1, most + 1), key=cost)


def workspace_bytes(
    queries: int, heads: int, k: int, whole: int, splits: int, workers: int, segment: int, fill_tiles: int
) -> int:
    """Return the workspace of one call in bytes; the same number as ``dsa_litetopk_workspace_bytes``."""
    rows = _COLUMNS // heads
    slots = k + fill_tiles * _TILE // 2 + _WARPS[heads] * segment
    blocks = -(-queries // rows)
    merged = min(queries, max(0, blocks - whole) * rows) if splits > 1 else 0
    return 256 + _aligned(workers * rows * slots * 8) + _aligned(merged * splits * k * 8)


def most_workspace(heads: int, k: int, multiprocessors: int) -> int:
    """Return an upper bound of the workspace of any call with these heads and k, in bytes."""
    rows = _COLUMNS // heads
    workers = _WORKERS_PER_MULTIPROCESSOR[heads] * multiprocessors
    lists = workspace_bytes(1, heads, k, 1, 1, workers, _SEGMENT[heads], _FILL_TILES)
    return lists + _aligned(2 * workers * rows * k * 8)  # _parts cuts into 2 * workers parts at most


def _aligned(size: int) -> int:
    return -(-size // 256) * 256
