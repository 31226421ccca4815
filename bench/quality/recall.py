# SPDX-License-Identifier: Apache-2.0
"""Recall of the indexer's top-k on tensors of a real run (dump_indexer.py). Not run by this project.

    recall.py --baseline DIR --ours DIR --line 0.33.0 --card h200

Each file holds, for some queries of one prefill chunk, `q` (FP8), `k`, `k_scale`, `weights`, `ks`, `ke` and
the selected `ids` (relative to ks, -1 behind the last). The scores are computed anew in float64. A selected
key counts as found if its score is at least the K-th best score less `--tolerance` times its magnitude: equal
scores may be exchanged, and FP8 tensor cores add with fewer bits. Reading the dumps needs torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

TOLERANCE = 1e-3


Array = np.ndarray


def scores(dump: dict[str, Array], row: int) -> Array:
    """Return the float64 scores of one query over its keys [ks, ke).

    ``k_scale[j] * sum_h weights[h] * max(0, q[h] . k[j])``; q is [queries, heads, dim], k [keys, dim].
    """
    begin, end = int(dump["ks"][row]), int(dump["ke"][row])
    dots = np.maximum(dump["q"][row] @ dump["k"][begin:end].T, 0.0)  # [heads, keys]
    weighted: Array = dump["weights"][row].reshape(-1) @ dots
    return weighted * dump["k_scale"].reshape(-1)[begin:end]


def recall(ids: Array, values: Array, tolerance: float = TOLERANCE) -> float:
    """Return the share of the top-k that ``ids`` holds; duplicates and ids out of range count as missed.

    Args:
        ids: [K], -1 for no key.
        values: [keys], the scores; NaN counts as -infinity.
        tolerance: relative to the K-th best score's magnitude.
    """
    count = min(len(ids), len(values))
    if count == 0:
        return 1.0
    best = np.where(np.isnan(values), -np.inf, values)
    cut = np.sort(best)[-count]
    limit = cut - tolerance * abs(cut) if np.isfinite(cut) else cut
    inside = np.unique(ids[(ids >= 0) & (ids < len(values))].astype(np.int64))
    return min(1.0, int((best[inside] >= limit).sum()) / count)


def of_folder(folder: Path, tolerance: float) -> list[float]:
    """Return the recall of every dumped query, in the order of the files' names.

    Raises:
        SystemExit: there is no dump.
    """
    import torch

    files = sorted(folder.glob("*.pt"))
    if not files:
        sys.exit(f"error: {folder} has no dumps\n  fix: see bench/quality/dump_indexer.py")
    found = []
    for file in files:
        loaded = torch.load(file, weights_only=True, map_location="cpu")
        dump = {name: tensor.to(torch.float64).numpy() for name, tensor in loaded.items()}
        for row in range(len(dump["ids"])):
            found.append(recall(dump["ids"][row], scores(dump, row), tolerance))
    return found


def main() -> None:
    """Compare the dumps of both sides and store the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", type=Path, required=True)
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--line", required=True)
    parser.add_argument("--card", default="unknown")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--out", type=Path, default=common.ROOT / "bench/results/quality")
    args = parser.parse_args()
    sides = [of_folder(folder, args.tolerance) for folder in (args.baseline, args.ours)]
    cases = [(f"recall tolerance={args.tolerance}", common.paired(*sides))]
    common.store(args, common.rows_of("recall", cases))
    print(f"worst query: {min(sides[0]):.4f} and {min(sides[1]):.4f}")


if __name__ == "__main__":
    main()
