# SPDX-License-Identifier: Apache-2.0
"""One fork to a side stream and its join.

Order that matters (research and measurements: docs/overlap.md): the main branch is recorded first, the side
branch right before the join, the side stream has the default priority. So a failing main branch leaves
nothing forked, and a captured graph keeps one side stream.

Lifetime without ``record_stream`` (whose blocks stay unusable until a capture ends and so grow the graph's
pool): what the side branch allocates goes back to the side stream's own free list and is handed out again
only to later side work, and that starts after a later fork, so after everything that the main stream did with
it. What the main stream allocated and the side branch reads must stay referenced until the join; `Lane.run`
keeps the arguments of its body alive until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

R = TypeVar("R")


class Lane:
    """Forks work to ``stream`` and joins it again: `fork`, then `run` (or `side` and `join`).

    One lane serves one place of one layer at a time. Its two events may be reused at once after the join.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.forked = False
        self.pending = False
        self._start = torch.cuda.Event()
        self._done = torch.cuda.Event()

    def fork(self) -> None:
        """Mark where the side branch may start: after all that the current stream was given so far.

        Raises:
            RuntimeError: a side branch of this lane was not joined.
        """
        if self.pending:
            raise RuntimeError("vllm.dsa overlap: the side branch before this fork was never joined")
        self._start.record()
        self.forked = True

    def wait_for_fork(self) -> None:
        """Let the current stream (the side stream, entered by others) wait for the fork."""
        self._start.wait()

    def side(self, body: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run ``body`` on the side stream, after the fork; `join` must follow on the main stream.

        If the body raises, what it recorded is joined before the exception goes on: a stream that a capture
        forked to must come back to it, or ending the capture fails with an error that hides this one.
        """
        if not self.forked:
            raise RuntimeError("vllm.dsa overlap: a side branch without a fork")
        self.forked = False
        failed = True
        try:
            # torch.cuda.stream and not `with stream`: vLLM's own current_stream() follows only the former.
            with torch.cuda.stream(self.stream):
                self._start.wait()
                self.pending = True
                try:
                    result = body(*args, **kwargs)
                finally:
                    self._done.record()
            failed = False
        finally:
            if failed and self.pending:
                self.join()
        return result

    def join(self) -> None:
        """Make the current stream wait for the side branch.

        Raises:
            RuntimeError: there is no side branch to join.
        """
        if not self.pending:
            raise RuntimeError("vllm.dsa overlap: a join without a side branch")
        self.pending = False
        self._done.wait()

    def run(self, body: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`side`, then `join`: what the current stream does next comes after the side branch."""
        result = self.side(body, *args, **kwargs)
        self.join()
        return result
