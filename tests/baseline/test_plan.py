"""Which tests concern a change: import graph, upstream's CI jobs, needs from evidence, the short set."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from vllm_series.baseline import needs, store
from vllm_series.baseline.ci_steps import matching, named_tests
from vllm_series.baseline.diff import compare
from vllm_series.baseline.imports import HUB, Graph, build_graph, imported
from vllm_series.baseline.needs import Need
from vllm_series.baseline.outcome import FileRun, Node, Run
from vllm_series.baseline.plan import Plan, PlannedTest, features_of, make_plan, touched_files
from vllm_series.errors import CheckFailed
from vllm_series.runtime import pristine_site
from vllm_series.workspace import Workspace

ROOT = Path(__file__).parents[2]
MODULES = {
    "vllm": "vllm/__init__.py",
    "vllm.envs": "vllm/envs.py",
    "vllm.a": "vllm/a/__init__.py",
    "vllm.a.b": "vllm/a/b.py",
    "tests.helper": "tests/helper.py",
}


@pytest.mark.parametrize(
    ("text", "path", "found"),
    [
        ("import vllm.a.b as x", "tests/t.py", {"vllm/a/b.py"}),
        ("from vllm.a import b", "tests/t.py", {"vllm/a/b.py"}),
        ("from vllm.a.b import Name", "tests/t.py", {"vllm/a/b.py"}),
        ("from vllm.a import Name", "tests/t.py", {"vllm/a/__init__.py"}),
        (
            "def f():\n    try:\n        from vllm import envs\n    except X: pass",
            "tests/t.py",
            {"vllm/envs.py"},
        ),
        ("from . import b", "vllm/a/c.py", {"vllm/a/b.py"}),
        ("from ..envs import X", "vllm/a/c.py", {"vllm/envs.py"}),
        ("from .helper import x", "tests/t.py", {"tests/helper.py"}),
        ("m.setattr('vllm.a.b.Class.method', 1)", "tests/t.py", {"vllm/a/b.py"}),
        ("x = 'vllm.org'; y = 'vllm'", "tests/t.py", set()),
        ("match x:\n    case 1:\n        import vllm.envs", "tests/t.py", {"vllm/envs.py"}),
        ("import os\nnot python", "tests/t.py", set()),
    ],
)
def test_imports_of_a_text(text: str, path: str, found: set[str]) -> None:
    assert imported(text, path, MODULES) == found


def test_distance_stops_at_hubs(tmp_path: Path) -> None:
    chain = {"tests/t.py": {"vllm/user.py"}, "vllm/user.py": {"vllm/rare.py"}}
    graph = Graph({name: frozenset(found) for name, found in chain.items()})
    assert graph.importers(["vllm/rare.py"], 1) == {"vllm/user.py": 1}
    assert graph.importers(["vllm/rare.py"], 2) == {"vllm/user.py": 1, "tests/t.py": 2}
    crowd = {f"vllm/m{n}.py": frozenset({"vllm/envs.py"}) for n in range(HUB + 1)}
    crowd["tests/t.py"] = frozenset({"vllm/m0.py"})
    crowd["tests/u.py"] = frozenset({"vllm/envs.py"})
    reached = Graph(crowd).importers(["vllm/envs.py"], 2)
    assert reached["tests/u.py"] == 1 and "tests/t.py" not in reached


@pytest.mark.parametrize("line", ["0.28.0", "0.33.0"])
def test_every_touched_file_belongs_to_a_feature(line: str) -> None:
    found = features_of(Workspace(ROOT), line)
    assert sorted({path for files in found.values() for path in files}) == touched_files(
        Workspace(ROOT), line
    )
    assert "vllm/envs.py" in found["core"] and len(found) > 1


def test_graph_cache_gives_the_same_graph(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name, text in {"vllm/__init__.py": "", "vllm/a.py": "", "tests/test_a.py": "import vllm.a"}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    cache = tmp_path / "c" / "graph.json"
    first, second = build_graph(tree, cache), build_graph(tree, cache)
    assert first.imports["tests/test_a.py"] == second.imports["tests/test_a.py"] == {"vllm/a.py"}


STEPS = """
group: G
steps:
- label: one
  device: h100
  num_devices: 2
  source_file_dependencies: [vllm/a, tests/v1]
  commands:
    - export X=1 && pytest -v -s v1/test_x.py::test_y --ignore=v1/other v1/more
    - python tool.py
- label: two
  source_file_dependencies: [vllm/b.py]
  commands: [pytest tests/v1]
- label: no rule
  commands: [pytest v1]
"""


def test_ci_steps(tmp_path: Path) -> None:
    (tmp_path / ".buildkite/test_areas").mkdir(parents=True)
    (tmp_path / ".buildkite/test_areas/area.yaml").write_text(STEPS)
    (tmp_path / "tests/v1/more").mkdir(parents=True)
    (tmp_path / "tests/v1/test_x.py").touch()
    (step,) = matching(tmp_path, ["vllm/a/deep/file.py", "csrc/x.cu"])
    assert (step.label, step.device, step.gpus, step.because) == ("one", "h100", 2, ("vllm/a/deep/file.py",))
    assert step.tests == ("tests/v1/more", "tests/v1/test_x.py")
    assert matching(tmp_path, ["docs/x.md"]) == []
    assert named_tests(["pytest 'unbalanced v1/more"], tmp_path) == ["tests/v1/more"]
    (tmp_path / ".buildkite/test_areas/bad.yaml").write_text("a: [")
    with pytest.raises(CheckFailed, match=r"bad\.yaml"):
        matching(tmp_path, ["vllm/a"])


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("skipped: Skipped: Only Hopper GPUs support FA3 and FlashMLA", needs.SM90),
        ("skipped: Skipped: FlashMLA is not supported on this platform", needs.SM90),
        ("skipped: Skipped: Only Blackwell GPUs support Cutlass MLA", needs.SM100),
        ("skipped: Skipped: TokenSpeed MLA requires an SM100-family GPU", needs.SM100),
        ("skipped: Skipped: Requires ROCm AITER attention", needs.OTHER),
        ("skipped: Skipped: Need at least 2 GPUs to run the test.", needs.MULTI),
        ("error: OSError: We couldn't connect to 'https://huggingface.co'", needs.HUB),
        ("skipped: could not import 'x': No module named 'flashinfer'", needs.PACKAGE),
        ("failed: RuntimeError: No CUDA GPUs are available", needs.GPU),
        ("failed: AssertionError: 1 != 2", needs.OTHER),
        ("skipped: Skipped: SM90 and SM100 only", needs.SM90),
        ("skipped: Skipped: Sparse MLA backend tests require CUDA or ROCm.", needs.GPU),
        ("skipped: Skipped: Requires CUDA, ROCm or XPU graph", needs.GPU),
        ("skipped: Skipped: ROCm cache layout", needs.OTHER),
    ],
)
def test_need_of_a_recorded_reason(reason: str, kind: str) -> None:
    assert needs.of_reason(reason) == kind
    found = needs.recorded({"skipped": 3}, {reason: 3})
    assert found is not None and found.kind == kind and reason[:40] in found.evidence


def test_one_pass_on_cpu_outweighs_every_skip() -> None:
    found = needs.recorded({"passed": 1, "skipped": 99}, {"skipped: Hopper": 99})
    assert found is not None and found.kind == needs.CPU and "1 of 100" in found.evidence
    assert needs.recorded({}, {}) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("@multi_gpu_test(num_gpus=2)\ndef test_x(): pass", needs.MULTI),
        ("def test_x(vllm_runner): pass", needs.HUB),
        ("if not current_platform.has_device_capability(100): skip", needs.SM100),
        ("if not current_platform.is_device_capability(90): skip", needs.SM90),
        ("x = torch.ones(1, device='cuda')", needs.GPU),
        ("pytestmark = pytest.mark.cpu_test", needs.CPU),
        ("def test_x(): assert 1", needs.CPU),
        ("pytestmark = pytest.mark.skipif(\n    not current_platform.is_rocm(), reason='x')", needs.OTHER),
        ("if not current_platform.is_cuda(): skip", needs.GPU),
    ],
)
def test_need_of_a_text(text: str, kind: str) -> None:
    assert needs.worded(text).kind == kind


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("tests/kernels/test_rocm_fp8.py", needs.OTHER),
        ("tests/models/amd/test_meta.py", needs.OTHER),
        ("tests/models/test_dsv41_gfx942_decode.py", needs.OTHER),
        ("tests/kernels/test_amdahl.py", needs.GPU),
        ("tests/kernels/test_fp8.py", needs.GPU),
    ],
)
def test_need_of_a_name(path: str, kind: str) -> None:
    assert needs.worded("if current_platform.is_cuda(): pass", path).kind == kind


def planned(
    path: str, seconds: float | None, weight: float, *reaches: str, kind: str = needs.CPU
) -> PlannedTest:
    return PlannedTest(path, 1, reaches, Need(kind, "last run"), seconds, 5, weight)


def test_short_set_keeps_the_budget_and_reaches_every_touched_file() -> None:
    tests = [
        planned("tests/a.py", 10, 1.0, "vllm/x.py"),
        planned("tests/b.py", 10, 1.0, "vllm/x.py"),
        planned("tests/c.py", 50, 0.1, "vllm/y.py"),
        planned("tests/d.py", 500, 2.0, "vllm/x.py"),
        planned("tests/e.py", 1, 1.0, "vllm/x.py", kind=needs.SM90),
    ]
    tests.append(dataclasses.replace(tests[0], path="tests/f.py", weight=9.0, steady=False))
    plan = Plan("0.0.0", ["vllm/x.py", "vllm/y.py"], [], tests)
    assert plan.short(60) == ["tests/a.py", "tests/c.py"]
    assert plan.short(75) == ["tests/a.py", "tests/b.py", "tests/c.py"]
    assert plan.short(5) == []


def test_store_round_trip(tmp_path: Path) -> None:
    ws = Workspace(tmp_path)
    run = Run("0.0.0", "upstream", "t", {}, {"cpu": "x"}, date="2026-01-01")
    nodes = {"a::x": Node("passed"), "a::y": Node("skipped", "Skipped: Hopper"), "a::z": Node("failed", "no")}
    run.files = {"tests/a.py": FileRun(12.0, 3.0, 1, nodes)}
    store.write(ws, run, {"off": {"counts": {}}})
    (last,) = store.read(ws, "0.0.0").values()
    assert last.counts == {"failed": 1, "passed": 1, "skipped": 1} and last.reasons["failed: no"] == 1
    assert last.seconds == 3.0  # the machine was busy: 12 s of wall time, 3 s of its own
    path = store.store_path(ws, "0.0.0")
    path.write_text(path.read_text().replace('"n"', '"m"'))
    with pytest.raises(CheckFailed, match="not a stored result"):
        store.read(ws, "0.0.0")
    assert store.read(ws, "9.9.9") == {}


def test_store_keeps_what_this_run_did_not_run(tmp_path: Path) -> None:
    """Times and needs of other files, and modes that were not run again, outlive a later full run."""
    ws = Workspace(tmp_path)

    def run(date: str, **files: str) -> Run:
        made = Run("0.0.0", "upstream", "t", {}, {"cpu": "x"}, date=f"{date}T00:00:00+00:00")
        for name, outcome in files.items():
            nodes = {f"{name}::x": Node(outcome)}
            made.files[f"tests/{name}.py"] = FileRun(1.0, 1.0, 1, nodes)
        return made

    store.write(ws, run("2026-01-01", a="failed", b="passed"), {"off": {"ok": True}, "on": {"ok": True}})
    also = run("2026-01-02", a="passed", c="passed", d="skipped")
    path = store.write(ws, run("2026-01-02", a="passed", c="passed"), {"on": {"ok": False}}, also=also)
    data = json.loads(path.read_text())
    assert {name: row.get("from") for name, row in data["files"].items()} == {
        "tests/a.py": None,
        "tests/b.py": "2026-01-01",
        "tests/c.py": None,
        "tests/d.py": None,
    }
    assert store.read(ws, "0.0.0")["tests/a.py"].counts == {"passed": 1}
    assert data["totals"] == {"passed": 2}  # of the set, not of everything that is kept
    assert data["diffs"] == {"off": {"ok": True}, "on": {"ok": False}}
    part = {"set": "features", "ok": True}
    store.write(ws, run("2026-01-03", a="failed"), {"on": part, "feature:x": part})
    again = json.loads(path.read_text())
    assert again["files"] == data["files"] and again["date"] == data["date"]
    assert again["diffs"] == {**data["diffs"], "on of features": part, "feature:x of features": part}


def test_stored_diff_says_what_ran_and_what_differs() -> None:
    before = {
        "tests/a.py::x": Node("passed"),
        "tests/a.py::y": Node("left_out"),
        "tests/a.py::z": Node("passed"),
    }
    after = {**before, "tests/a.py::x": Node("crash", "SIGSEGV"), "tests/a.py::z": Node("not_run")}
    one, two = (Run("0.0.0", mode, "t", {}, {}, date="2026-01-01") for mode in ("upstream", "on"))
    one.files = {"tests/a.py": FileRun(nodes=before), "tests/b.py": FileRun()}
    two.files = {"tests/a.py": FileRun(nodes=after)}
    found = compare(one, two, exact=False, planned=["tests/a.py", "tests/b.py", "tests/c.py"])
    row = store.diff_row(found, two, "full", "c0ffee")
    assert row["files"] == "1 of 3" and row["unreached"] == ["tests/b.py", "tests/c.py"]
    two.files["tests/d.py"] = FileRun(nodes={"tests/d.py": Node("not_run", "the time was used up")})
    late = store.diff_row(found, two, "gpu", "c0ffee")
    assert late["files"] == "1 of 4" and late["unreached"][0] == "tests/d.py"
    del two.files["tests/d.py"]
    assert row["compared"] == 1 and row["counts"] == {"REGRESSION": 1, "NOT_COMPARED": 1, "SAMPLED": 1}
    assert row["differs"] == {"tests/a.py::x": "REGRESSION: passed / crash SIGSEGV"}
    assert row["ok"] is False and row["commit"] == "c0ffee" and row["set"] == "full" and "names" not in row
    assert store.diff_row(found, two, store.SELECTED, "c0ffee")["names"] == ["tests/a.py"]


def test_stored_results_are_readable_and_small() -> None:
    ws = Workspace(ROOT)
    found = sorted((ROOT / "bench/results/upstream-tests").glob("*-cpu.json"))
    assert found
    for path in found:
        line = path.name.removesuffix("-cpu.json")
        data = json.loads(path.read_text())
        assert data["line"] == line and data["totals"].get("passed", 0) > 0
        assert store.read(ws, line) and path.stat().st_size < 400_000


@pytest.mark.slow
@pytest.mark.parametrize("line", ["0.33.0", "0.28.0"])
def test_plan_of_the_real_tree(line: str) -> None:
    ws = Workspace(ROOT)
    site = pristine_site(ws, line)
    touched = ["vllm/v1/attention/backends/mla/indexer.py", "vllm/utils/deep_gemm.py"]
    plan = make_plan(ws, line, site, touched=touched)
    direct = {one.path: one for one in plan.tests if one.distance == 1}
    indexer = direct["tests/v1/attention/test_indexer_dcp_localize.py"]
    assert "vllm/v1/attention/backends/mla/indexer.py" in indexer.reaches
    assert direct["tests/kernels/attention/test_deepgemm_attention.py"].need.kind in (
        needs.SM90,
        needs.GPU,
        needs.SM100,
    )
    assert any(step.device.startswith("h100") and "tests/v1/attention" in step.tests for step in plan.steps)
    assert {one.need.kind for one in plan.tests} >= {
        needs.CPU,
        needs.SM90,
        needs.SM100,
        needs.MULTI,
        needs.HUB,
    }
    assert "tests/v1/attention/test_indexer_dcp_localize.py" in plan.short(300)
