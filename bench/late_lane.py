# SPDX-License-Identifier: Apache-2.0
"""A fork of the overlap with one branch held up, so that a missing wait shows in the results."""

from __future__ import annotations

from typing import Any

#: Where a branch of a fork can be held up, and the clock cycles of it: some 1 ms, far more than a layer.
LATE = ("main-before", "main-after", "side-begin", "side-end")
DELAY = 2_000_000


def late_lane(where: str, stream: Any) -> Any:
    """A lane to ``stream`` of which one branch is late, so that a missing wait shows."""
    import torch
    from vllm.dsa.overlap.streams import Lane

    class Late(Lane):
        def fork(self) -> None:
            if where == "main-before":
                torch.cuda._sleep(DELAY)
            super().fork()
            if where == "main-after":
                torch.cuda._sleep(DELAY)

        def wait_for_fork(self) -> None:
            super().wait_for_fork()
            if where == "side-begin":
                torch.cuda._sleep(DELAY)

        def side(self, body: Any, *args: Any, **kwargs: Any) -> Any:
            def delayed(*args: Any, **kwargs: Any) -> Any:
                if where == "side-begin":
                    torch.cuda._sleep(DELAY)
                result = body(*args, **kwargs)
                if where == "side-end":
                    torch.cuda._sleep(DELAY)
                return result

            return super().side(delayed, *args, **kwargs)

    return Late(stream)
