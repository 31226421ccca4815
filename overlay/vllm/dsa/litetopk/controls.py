# SPDX-License-Identifier: Apache-2.0
"""The controls of LiteTopK: ``VLLM_LITETOPK`` and what refines it, read at use time in this one place.

    VLLM_LITETOPK           1: use the kernel where it applies (default 0)
    VLLM_LITETOPK_DISPATCH  measured: only at sizes at which it was measured not to be slower (default);
                            always: at every size that it takes, for tests and measurements
    VLLM_LITETOPK_MIN_KEYS  a request with fewer keys takes upstream's path in either case (default 0)

They are registered in ``vllm/envs.py``. While ``VLLM_LITETOPK`` is off the others are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.dsa import switches

MAIN = "VLLM_LITETOPK"
DISPATCH = "VLLM_LITETOPK_DISPATCH"
MIN_KEYS = "VLLM_LITETOPK_MIN_KEYS"
ALL = (MAIN, DISPATCH, MIN_KEYS)


@dataclass(frozen=True)
class Controls:
    """Values of the controls at one moment.

    Attributes:
        on: the main switch.
        always: whether the measured table is not asked.
        min_keys: fewest keys of a request that may be fused.
    """

    on: bool
    always: bool
    min_keys: int


def read() -> Controls:
    """Return the controls as they are now.

    Raises:
        ValueError: one holds a wrong value while the feature is on.
        SwitchesMissing: this vLLM does not have the patches.
    """
    return Controls(
        on=bool(switches.get(MAIN)),
        always=switches.get(DISPATCH) == "always",
        min_keys=int(switches.get(MIN_KEYS)),
    )
