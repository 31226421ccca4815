"""The runner for a GPU machine: a kit, an installed package, results that compare here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from vllm_series.baseline.diff import Kind, compare, judge
from vllm_series.baseline.outcome import Run
from vllm_series.baseline.session import confirmed

ROOT = Path(__file__).parents[2]
TORCH = """
__version__ = "0"
class cuda:
    is_available = staticmethod(lambda: False)
"""
TEST = """
import os, vllm
def test_value(): assert vllm.VALUE == 1
def test_off(): assert os.environ.get("VLLM_DSA") != "0" or vllm.VALUE == 1
def test_same(): pass
def test_gone():
    from vllm import old
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_device_runs_both_trees_without_touching_the_installed_one(tmp_path: Path) -> None:
    installed = write(
        tmp_path / "site", {"vllm/__init__.py": "VALUE = 1\n", "vllm/old.py": "", "torch/__init__.py": TORCH}
    )
    plan = {
        "line": "0.0.0",
        "files": ["tests/test_a.py"],
        "modes": {"upstream": {}, "off": {"VLLM_DSA": "0"}},
        "trees": {"upstream": "a" * 40, "off": "b" * 40},
    }
    kit = write(
        tmp_path / "kit",
        {
            "tests/test_a.py": TEST,
            "pyproject.toml": "",
            "changed/vllm/__init__.py": "VALUE = 2\n",
            "removed.json": '["vllm/old.py"]',
            "plan.json": json.dumps(plan),
        },
    )
    out = tmp_path / "out"
    argv = ["--kit", str(kit), "--out", str(out), "--work", str(tmp_path / "work"), "--jobs", "2"]
    env = {**os.environ, "PYTHONPATH": f"{installed}:{ROOT / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_series.baseline.device", *argv], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (installed / "vllm/__init__.py").read_text() == "VALUE = 1\n" and (
        installed / "vllm/old.py"
    ).exists()
    before, after = Run.load(out / "upstream.json"), Run.load(out / "off.json")
    assert before.counts() == {"passed": 4}
    found = compare(before, after, exact=True)
    judge(found, confirmed(out / "confirmed.json", "off"))
    kinds = {row.node.rpartition("::")[2]: row.kind for row in found.rows}
    assert kinds == {
        "test_value": Kind.REGRESSION,
        "test_off": Kind.REGRESSION,
        "test_same": Kind.SAME,
        "test_gone": Kind.REGRESSION,
    }
    assert all(row.again == [("passed", "failed")] * 3 for row in found.of(Kind.REGRESSION))


def test_used_up_budget_is_said_not_hidden(tmp_path: Path) -> None:
    installed = write(tmp_path / "site", {"vllm/__init__.py": "VALUE = 1\n", "torch/__init__.py": TORCH})
    plan = {"line": "0", "files": ["tests/test_a.py"], "modes": {"upstream": {}, "on": {}}}
    plan["trees"] = {"upstream": "a", "on": "b"}
    files = {
        "tests/test_a.py": TEST,
        "pyproject.toml": "",
        "removed.json": "[]",
        "plan.json": json.dumps(plan),
    }
    kit, out = write(tmp_path / "kit", files), tmp_path / "out"
    argv = ["--kit", str(kit), "--out", str(out), "--work", str(tmp_path / "work"), "--budget", "5"]
    env = {**os.environ, "PYTHONPATH": f"{installed}:{ROOT / 'src'}"}
    subprocess.run([sys.executable, "-m", "vllm_series.baseline.device", *argv], env=env, check=True)
    found = compare(Run.load(out / "upstream.json"), Run.load(out / "on.json"), exact=False)
    assert [row.kind for row in found.rows] == [Kind.NOT_COMPARED]
