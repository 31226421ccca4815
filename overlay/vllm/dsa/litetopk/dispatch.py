# SPDX-License-Identifier: Apache-2.0
"""At which sizes the kernel takes a request's rows: a table of what was measured. No torch, no device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from vllm.dsa.litetopk.controls import Controls
from vllm.dsa.litetopk.plan import MAX_KEYS

#: (most queries, fewest keys): the first row that fits the number of queries decides; of several requests in
#: one launch, all of their queries and the keys of the shortest one. All rows of
#: bench/results/litetopk/0.33.0-h200.json with at least that many keys are at least 1.02 times as fast
#: as upstream's default path (512 MiB of logits), with 32 and with 64 heads; with fewer keys at least one is
#: not, or none was measured. Between two measured numbers of queries (8, 64, 512, 1024, 2048, 4096, 8192)
#: both must be fast; the last row begins an eighth below 8192, because a chunk that shares its step with
#: decodes is a little shorter than the step's budget.
TABLE = ((64, 1 << 15), (1024, 1 << 18), (7167, 1 << 17), (1 << 31, 1 << 16))

#: The table was measured with this top-k only, that of DeepSeek-V3.2 and GLM-5.x.
MEASURED_K = 2048

TOO_MANY_KEYS = f"a request of more than {MAX_KEYS} keys"
SMALL = "a size at which it was not measured to be slower"
BELOW_MIN = "a request of fewer keys than VLLM_LITETOPK_MIN_KEYS"
#: Upstream scores the requests of a chunk in one launch; alone in a launch of its own each would be slower.
SHARED = "a request that shares upstream's chunk with others"


def worthwhile(queries: int, keys: int) -> bool:
    """Return whether the kernel was measured not to be slower than upstream's default path at such a size.

    Args:
        queries: rows that one rank scores in one launch.
        keys: of the longest row; of several requests those of the shortest one.
    """
    return next(keys >= fewest for most, fewest in TABLE if queries <= most)


def why_not(shares: Iterable[int], keys: int, k: int, controls: Controls) -> str:
    """Return why the rows of one launch take upstream's path, '' if they do not.

    Args:
        shares: rows of the launch on each rank that scores some of them; one number without row sharding.
            The answer must be the same on all ranks, so it is yes only if it is yes for each of them.
        keys: of its request, or of the shortest of its requests.
        k: top-k.
        controls: what the environment says.
    """
    if keys > MAX_KEYS:
        return TOO_MANY_KEYS
    if keys < controls.min_keys:
        return BELOW_MIN
    if controls.always:
        return ""
    if k != MEASURED_K:
        return f"a top-k of {k}, which was not measured"
    return "" if all(worthwhile(rows, keys) for rows in shares) else SMALL


def shares(first: int, stop: int, sizes: Sequence[int] | None) -> list[int]:
    """Return how many of the rows ``[first, stop)`` each rank scores, ranks without any left out.

    Args:
        first: in rows of the step's prefill part.
        stop: one past the last.
        sizes: rows of each rank's contiguous slice, in rank order, or None if every rank scores all rows.
    """
    if sizes is None:
        return [stop - first]
    bounds = pairwise(accumulate(sizes, initial=0))
    found = [min(stop, high) - max(first, low) for low, high in bounds]
    return [rows for rows in found if rows > 0]
