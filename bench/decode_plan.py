# SPDX-License-Identifier: Apache-2.0
"""What bench/e2e_decode.py measures: its points, what runs at them, and the engine that is needed."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

MODES = ("off", "wk", "full", "native", "auto")
#: Context of --long-batch, tokens of a cache block, and (batch, context) of the points of a check.
LONG = 131072
BLOCK = 64
CHECKS = [(1, 700), (4, 3000), (16, 3000), (64, 900), (3, 20), (2, 20000)]
#: Those of them at which a branch is held up (``--late``).
LATE_CHECKS = [(1, 700), (16, 3000), (3, 20)]
#: Those at which it runs with a top-k whose result is determined (``--exact-topk``).
EXACT_CHECKS = [(16, 3000), (2, 20000)]


class Variant(NamedTuple):
    """Something that an engine start runs.

    Attributes:
        name: is in that of the raw results.
        mode: one of `MODES`.
        late: which branch is held up, see `late_lane.LATE`.
        exact: whether the top-k is exact_topk's.
        again: off for the n-th time after the first: what differs there is not the overlap's doing.
    """

    name: str
    mode: str
    late: str = ""
    exact: bool = False
    again: int = 0


def points(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Batch and context of every point, in the order in which they are measured."""
    if args.what == "check":
        return CHECKS + args.also
    found = [(batch, context) for context in args.context for batch in args.batch]
    return found + [(batch, LONG) for batch in args.long_batch] + args.also


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What `decode_engine.Engine` needs to know."""
    wanted = points(args)
    per_step = 1 + args.mtp
    room = (args.check_steps if args.what == "check" else args.steps + args.profile + 64) * per_step
    blocks = max(batch * (-(-(context + room) // BLOCK)) for batch, context in wanted)
    hf = dict(args.hf_config)
    if args.index_topk_freq != 1:
        hf["index_topk_freq"] = args.index_topk_freq
    # Only the blocks that are used, in case of two cache groups: filling all of a card's memory takes long.
    llm = {"num_gpu_blocks_override": 2 * blocks + 64} | args.llm
    if args.mtp:
        hf["num_nextn_predict_layers"] = 1
        llm["speculative_config"] = {"method": "mtp", "num_speculative_tokens": args.mtp}
    return {
        "heads": args.heads,
        "index_heads": args.index_heads,
        "layers": args.layers,
        "max_len": max(context for _, context in wanted) + room + 64,
        "per_step": per_step,
        "batches": sorted({batch for batch, _ in wanted}),
        "graph": args.graph,
        "inductor": args.inductor,
        "hf": hf,
        "llm": llm,
    }


def variants(args: argparse.Namespace) -> list[Variant]:
    """Everything that is run, in turn."""
    found = [Variant(mode, mode) for mode in args.modes]
    if args.what == "check" and args.in_process:
        for number in range(1, args.off_passes + 1):
            found.append(Variant(f"off+again{number if number > 1 else ''}", "off", again=number))
        found += [Variant(f"{args.modes[-1]}+{where}", args.modes[-1], where) for where in args.late]
        if args.exact_topk:
            found += [Variant(f"{mode}+exact", mode, exact=True) for mode in args.modes]
            found.append(Variant("off+again+exact", "off", exact=True, again=1))
    return found
