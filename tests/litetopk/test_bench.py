"""bench/litetopk_operator.py and litetopk_e2e.py, as far as they run without torch's CUDA."""

from __future__ import annotations

import ast
import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def definitions(*names: str) -> dict[str, Any]:
    """Run the named top-level definitions of the script alone: this environment has no torch."""
    tree = ast.parse((ROOT / "bench/litetopk_operator.py").read_text(encoding="utf-8"))
    kept = [
        node
        for node in tree.body
        if getattr(node, "name", None) in names
        or (
            isinstance(node, (ast.Assign, ast.AnnAssign))
            and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) in names
        )
    ]
    scope: dict[str, Any] = {
        "itertools": itertools,
        "random": random,
        "json": json,
        "statistics": statistics,
        "Path": Path,
    }
    exec(compile(ast.Module(kept, []), "litetopk_operator", "exec"), scope)
    return scope


def test_the_beginning_of_the_matrix_is_stratified() -> None:
    scope = definitions("Shape", "HISTORY", "MATRIX", "matrix")
    shapes = scope["matrix"]()
    assert len(scope["MATRIX"]) == 665 and len(shapes) == len(set(shapes)) == 317
    assert shapes == scope["matrix"]()  # the same order in each lease
    assert all(keys <= 1 << 20 and queries <= 1 << 17 for _, queries, keys, _, _ in shapes)
    history = [
        min((h for h in scope["HISTORY"]), key=lambda h: abs(h - (keys - queries) / requests))
        for _, queries, keys, requests, _ in shapes[:133]
    ]
    assert sorted(set(history)) == scope["HISTORY"]
    assert {requests for _, _, _, requests, _ in shapes[:133]} == {1, 4, 16, 32, 128}


def test_slices_are_those_of_upstreams_planner() -> None:
    scope = definitions("BUDGET", "Slice", "default_slices")
    cut = scope["default_slices"]
    assert cut(8192, 1 << 20, 1) == [(lo, lo + 128, 0, 1 << 20) for lo in range(0, 8192, 128)]
    assert cut(64, 1 << 20, 1) == [(0, 64, 0, 1 << 20)]
    # Four requests of 64 rows and 2^18 keys: two together are 2^26 logits, three more than 2^27.
    assert cut(256, 1 << 20, 4) == [(0, 128, 0, 1 << 19), (128, 256, 1 << 19, 1 << 20)]
    for queries, keys, requests in ((4096, 1 << 19, 4), (1024, 1 << 16, 16), (8192, 1 << 20, 1)):
        slices = cut(queries, keys, requests)
        assert [row for lo, hi, _, _ in slices for row in range(lo, hi)] == list(range(queries))
        assert all((hi - lo) * (last - first) <= scope["BUDGET"] // 4 for lo, hi, first, last in slices)


def test_a_stored_shape_is_known_again(tmp_path: Path) -> None:
    scope = definitions("K", "Shape", "case_of", "stored")
    shape = (64, 8192, 1 << 20, 1, "iid")
    rows = json.loads((ROOT / "bench/results/litetopk/0.33.0-h200.json").read_text(encoding="utf-8"))["rows"]
    assert scope["case_of"](shape) in {row["case"] for row in rows}
    file = tmp_path / "rows.json"
    assert scope["stored"](file) == {}
    file.write_text(json.dumps({"rows": rows}))
    assert scope["case_of"](shape) in scope["stored"](file)
