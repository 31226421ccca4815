# SPDX-License-Identifier: Apache-2.0
"""How large a buffer DeepGEMM's MQA logits kernel needs: host arithmetic alone.

The two pins of DeepGEMM lay the logits out differently. *Compressed* (line 0.33.0): row i starts at the
first key of its own range, and rows are as long as the longest range. *Full* (line 0.28.0): column j is key
j, and a row has one block of keys more. In both the queries are padded to whole tiles and a row to 1024
bytes. These are the sizes of SM90, the only card this feature is for; the op itself refuses any other.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 4  # float32
BLOCK_QH = 128  # queries times heads of a tile
BLOCK_KV = 256  # keys of a tile
ROW_ALIGNMENT = 1024 // BYTES
#: Where the buffer starts. PyTorch's allocator gives 512; rows are multiples of 1024.
START_ALIGNMENT = 1024


@dataclass(frozen=True)
class Layout:
    """The layout of one pin of DeepGEMM.

    Attributes:
        heads: index heads, a divisor of 128.
        compressed: see the module's text.
    """

    heads: int
    compressed: bool

    @property
    def block_q(self) -> int:
        return BLOCK_QH // self.heads

    def shape(self, queries: int, width: int) -> tuple[int, int]:
        """Return rows and row length, in elements, of the buffer for logits ``[queries, width]``."""
        rows = _up(queries, self.block_q)
        if self.compressed:
            return rows, _up(_up(width, BLOCK_KV), ROW_ALIGNMENT)
        return rows, _up(width + BLOCK_KV, ROW_ALIGNMENT)

    def most_bytes(self, budget: int, queries: int, keys: int) -> int:
        """Return the bytes that hold the buffer of every chunk that upstream can plan.

        Upstream cuts a prefill into chunks of m queries and n keys with ``m <= queries``, ``n <= keys`` and
        ``4 * m * n <= budget``, or ``m = 1``. Padding adds less than ``p`` rows and ``s`` columns, and
        ``(m + p) * (n + s)`` under ``m * n = const`` is largest where m or n is.

        Args:
            budget: bytes of the logits of one chunk (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB).
            queries: most query tokens of a batch.
            keys: most keys of a chunk.
        """
        p = self.block_q - 1
        s = ROW_ALIGNMENT - 1 if self.compressed else BLOCK_KV + ROW_ALIGNMENT - 1
        most = budget // BYTES
        corners = [(1, keys)]  # a single query is never cut
        for m, n in (
            (queries, min(keys, most // max(1, queries))),
            (min(queries, most // max(1, keys)), keys),
        ):
            # What integer division took away is less than one row or column more.
            corners.append((min(queries, m + 1), min(keys, n + 1)))
        return BYTES * max((m + p) * (n + s) for m, n in corners)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
