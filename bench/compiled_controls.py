# SPDX-License-Identifier: Apache-2.0
"""Controls of a check on line 0.28.0: the same compiled graph again, on one stream, or with a branch held up.

There torch.compile fixes the mode, and another mode is other code with other rounding. So each engine is also
compared with itself: what runs only decides at each capture (and each eager pass) whether it forks. CUDA
graphs are captured anew for each control, in a memory pool of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from late_lane import LATE, late_lane

AGAIN, SERIAL = "again", "serial"
NAMES = (AGAIN, SERIAL, *LATE)


class Controls:
    """The overlap of all layers of one engine and its CUDA graphs.

    Args:
        runner: upstream's V1 model runner, started and without requests.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.compilation.cuda_graph import CUDAGraphWrapper
        from vllm.dsa.overlap.compiled.layer import LayerOverlap

        self.runner = runner
        layers = runner.vllm_config.compilation_config.static_forward_context.values()
        self.overlaps = [layer for layer in layers if isinstance(layer, LayerOverlap)]
        self.wrappers = list(CUDAGraphWrapper._all_instances)
        names = ("_choose", "_wk_lane", "_indexer_lane")
        self._own = [{name: getattr(overlap, name) for name in names} for overlap in self.overlaps]

    def capture(self, control: str) -> list[dict[str, Any]]:
        """Let all layers do as ``control`` says and capture all graphs again.

        Args:
            control: one of `NAMES`.

        Returns:
            What the capture decided, by reason.
        """
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.dsa import counters
        from vllm.dsa.overlap.mode import Mode

        for overlap, own in zip(self.overlaps, self._own, strict=True):
            vars(overlap).update(own)
            if control == SERIAL:
                overlap._choose = lambda _tokens: Mode.OFF
            elif control in LATE:
                overlap._wk_lane = late_lane(control, own["_wk_lane"].stream)
                overlap._indexer_lane = late_lane(control, own["_indexer_lane"].stream)
        pool = torch.cuda.graph_pool_handle()
        for wrapper in self.wrappers:
            wrapper.clear_graphs()
            wrapper.graph_pool = pool
        counters.reset()
        with set_current_vllm_config(self.runner.vllm_config):
            self.runner.capture_model()
        torch.cuda.synchronize()
        return counters.snapshot("overlap")


def measure(args: argparse.Namespace, engine: Any, plan: Any, result: dict[str, Any]) -> None:
    """Check all controls of ``args.controls`` that the engine's mode has, into ``result["controls"]``.

    Args:
        args: of bench/e2e_decode.py.
        engine: a `decode_engine.Engine`.
        plan: a `decode_child.Plan`; held up is a branch at its ``late_points`` only.
        result: of this engine start.
    """
    from vllm.dsa import counters

    controls = Controls(engine.runner)
    found = result["controls"] = {}
    for name in args.controls:
        if name != AGAIN and not controls.overlaps:
            continue  # off forks nothing
        captured = controls.capture(name)
        points = plan.late_points if name in LATE else plan.points
        checked = {f"B={b} ctx={c}": engine.check(b, c, plan.check_steps) for b, c in points}
        found[name] = {"points": checked, "forks_of_capture": captured, "forks": counters.snapshot("overlap")}
        print(f"control {name} done: {found[name]['forks']}", flush=True)


def rows(
    starts: dict[str, list[dict[str, Any]]],
    case: Callable[[str, str], str],
    agreement: Callable[[dict[str, Any], dict[str, Any]], tuple[float, float]],
) -> list[dict[str, Any]]:
    """Two rows per mode, control and point, as those of a check, against the mode's own first pass.

    Where its two passes (``again``) differ, the better of both counts; ``own_passes`` has both shares, and
    `differences` says where that one differs.

    Args:
        starts: what was measured, by mode.
        case: gives the case of a mode and a point.
        agreement: of two passes: share of equal steps, 1.0 if all tokens are equal.
    """
    made = []
    for mode, of_mode in starts.items():
        for start in of_mode[:1]:
            controls = start.get("controls", {})
            again = controls.get(AGAIN, {}).get("points", {})
            for name, control in controls.items():
                for point, found in control["points"].items():
                    passes = [start["points"][point]]
                    if name != AGAIN and point in again:
                        passes.append(again[point])
                    against = [agreement(one, found) for one in passes]
                    best = against.index(max(against))
                    more: dict[str, Any] = {"own_passes": [pair[0] for pair in against]}
                    if against[best] != (1.0, 1.0):
                        # Within one engine what older requests left in the caches differs too.
                        more |= differences(passes[best], found)
                        more.pop("caches_differ", None)
                    for metric, value in zip(("equal logits", "equal tokens"), against[best], strict=True):
                        row = {"case": f"{case(mode, point)} control={name}", "metric": metric, "unit": "1"}
                        row |= {"baseline": 1.0, "ours": value, "ratio": value, "runs": len(found["logits"])}
                        made.append(row | more)
    return made


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Where two passes differ: rows of the last hidden states and of the logits, and caches at the end.

    The caches are those of the whole engine, so they only tell where both engines did the same before.
    """
    if "rows" not in one or "rows" not in other:
        return {}
    found: dict[str, Any] = {"rows": sum(len(logits) for _, logits in one["rows"])}
    for index, name in enumerate(("hidden_rows_differ", "logit_rows_differ")):
        pairs = zip(one["rows"], other["rows"], strict=False)
        found[name] = sum(x != y for a, b in pairs for x, y in zip(a[index], b[index], strict=False))
    caches = [name for name, value in one["caches"].items() if other["caches"].get(name) != value]
    return found | {"caches_differ": caches}
