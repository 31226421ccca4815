"""The runner for a GPU machine: a kit, an installed package, results that compare here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_series.baseline import card
from vllm_series.baseline.diff import Kind, compare, judge
from vllm_series.baseline.outcome import Run
from vllm_series.baseline.session import confirmed
from vllm_series.errors import UsageError

ROOT = Path(__file__).parents[2]
PATIENT = ("--budget", "4000", "--test-seconds", "600")  # a busy machine must not change the outcome
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
def test_pristine():
    import importlib.util as u
    assert u.find_spec("vllm.dsa") is None
def test_gone():
    from vllm import old
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    "package",
    [
        {"vllm/__init__.py": "VALUE = 1\n"},
        {"vllm/__init__.py": "VALUE = 3\n", "vllm/dsa/__init__.py": "", "vllm/_dsa_C.so": "kernels"},
    ],
    ids=["upstream's wheel", "a patched wheel"],
)
def test_device_runs_both_trees_without_touching_the_installed_one(
    tmp_path: Path, package: dict[str, str]
) -> None:
    installed = write(tmp_path / "site", {**package, "vllm/old.py": "", "torch/__init__.py": TORCH})
    plan = {
        "line": "0.0.0",
        "files": [
            {"path": "tests/test_a.py", "seconds": 2000, "sample": 0, "modes": ["upstream", "off"]},
            {"path": "tests/test_b.py", "seconds": 2000, "sample": 0, "modes": ["upstream", "feature:x"]},
        ],
        "modes": {"upstream": {}, "off": {"VLLM_DSA": "0"}, "feature:x": {"VLLM_X": "1"}},
        "trees": {"upstream": "a" * 40, "off": "b" * 40, "feature:x": "b" * 40},
    }
    kit = write(
        tmp_path / "kit",
        {
            "tests/test_a.py": TEST,
            "tests/test_b.py": "def test_x(): pass\n",
            "pyproject.toml": "",
            "patched/vllm/__init__.py": "VALUE = 2\n",
            "patched/vllm/dsa/__init__.py": "",
            "pristine/vllm/__init__.py": "VALUE = 1\n",
            "removed.json": '{"patched": ["vllm/old.py"], "pristine": ["vllm/dsa/__init__.py"]}',
            "plan.json": json.dumps(plan),
        },
    )
    out = tmp_path / "out"
    argv = ["--kit", str(kit), "--out", str(out), "--work", str(tmp_path / "work"), "--jobs", "2", *PATIENT]
    env = {**os.environ, "PYTHONPATH": f"{installed}:{ROOT / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_series.baseline.device", *argv], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert all((installed / name).read_text() == text for name, text in package.items())
    assert (installed / "vllm/old.py").exists()
    kernels = [(tmp_path / "work" / side / "vllm/_dsa_C.so").exists() for side in ("pristine", "patched")]
    assert kernels == [False, "vllm/_dsa_C.so" in package]
    before, after = Run.load(out / "upstream.json"), Run.load(out / "off.json")
    assert before.counts() == {"passed": 6} and set(after.files) == {"tests/test_a.py"}
    feature = compare(before, Run.load(out / "feature-x.json"), exact=False, planned=["tests/test_b.py"])
    assert [(row.node, row.kind) for row in feature.rows] == [("tests/test_b.py::test_x", Kind.SAME)]
    assert not feature.unreached
    found = compare(before, after, exact=True, planned=list(after.files))
    judge(found, confirmed(out / "confirmed.json", "off"))
    kinds = {row.node.rpartition("::")[2]: row.kind for row in found.rows}
    assert kinds == {
        "test_value": Kind.REGRESSION,
        "test_off": Kind.REGRESSION,
        "test_same": Kind.SAME,
        "test_pristine": Kind.REGRESSION,
        "test_gone": Kind.REGRESSION,
    }
    assert all(row.again == [("passed", "failed")] * 3 for row in found.of(Kind.REGRESSION))


def test_used_up_budget_is_said_not_hidden(tmp_path: Path) -> None:
    installed = write(tmp_path / "site", {"vllm/__init__.py": "VALUE = 1\n", "torch/__init__.py": TORCH})
    file = {"path": "tests/test_a.py", "seconds": 2000, "sample": 0}
    plan = {"line": "0", "files": [file], "modes": {"upstream": {}, "on": {}}}
    plan["trees"] = {"upstream": "a", "on": "b"}
    files = {
        "tests/test_a.py": TEST,
        "pyproject.toml": "",
        "removed.json": '{"patched": [], "pristine": []}',
        "plan.json": json.dumps(plan),
    }
    kit, out = write(tmp_path / "kit", files), tmp_path / "out"
    argv = ["--kit", str(kit), "--out", str(out), "--work", str(tmp_path / "work"), "--budget", "5"]
    env = {**os.environ, "PYTHONPATH": f"{installed}:{ROOT / 'src'}"}
    subprocess.run([sys.executable, "-m", "vllm_series.baseline.device", *argv], env=env, check=True)
    found = compare(Run.load(out / "upstream.json"), Run.load(out / "on.json"), exact=False)
    assert [row.kind for row in found.rows] == [Kind.NOT_COMPARED]


MANY = """
import pytest
@pytest.mark.parametrize("n", range(40))
def test_many(n): pass
@pytest.mark.parametrize("n", range(3))
def test_few(n): pass
def test_one(): pass
"""


def test_a_file_with_more_tests_than_its_sample_runs_the_same_ones_on_both_trees(tmp_path: Path) -> None:
    """The patched tree has a test more; the sample of what both have stays the same one."""
    installed = write(tmp_path / "site", {"vllm/__init__.py": "", "torch/__init__.py": TORCH})
    plan = {"line": "0", "modes": {"upstream": {}, "on": {}}, "trees": {"upstream": "a", "on": "b"}}
    file = {"path": "tests/test_a.py", "seconds": 2000, "sample": 10}
    files = {
        "tests/test_a.py": MANY,
        "patched/tests/test_a.py": MANY + "def test_new(): pass\n",
        "pyproject.toml": "",
        "removed.json": '{"patched": [], "pristine": []}',
        "plan.json": json.dumps({**plan, "files": [file]}),
    }
    kit, out = write(tmp_path / "kit", files), tmp_path / "out"
    argv = [
        "--kit",
        str(kit),
        "--out",
        str(out),
        "--work",
        str(tmp_path / "work"),
        "--isolation",
        "fork",
        *PATIENT,
    ]
    env = {**os.environ, "PYTHONPATH": f"{installed}:{ROOT / 'src'}"}
    subprocess.run([sys.executable, "-m", "vllm_series.baseline.device", *argv], env=env, check=True)
    before, after = Run.load(out / "upstream.json"), Run.load(out / "on.json")
    assert before.counts() == {"left_out": 34, "passed": 10}
    ran = {node.partition("::")[2] for node, one in before.nodes().items() if one.outcome == "passed"}
    assert (
        "test_one" in ran and sum(name.startswith("test_few") for name in ran) == 3
    )  # every function is seen
    found = compare(before, after, exact=False)
    counts = found.counts()
    assert counts["NEW"] == 1 and counts["SAME"] >= 9 and counts["SAMPLED"] >= 33 and not found.failing()
    assert found.samples() == {"tests/test_a.py": (45 - counts["SAMPLED"], 45)}


@pytest.mark.parametrize("isolation", ["auto", "fork"])
def test_where_importing_touches_the_gpu_files_get_fresh_interpreters(tmp_path: Path, isolation: str) -> None:
    """A torch whose children cannot use the card: `auto` sees it, `fork` was asked for."""
    broken = TORCH + "    is_initialized = staticmethod(lambda: True)\n"
    torch = {"torch/__init__.py": broken, "tests/conftest.py": "import torch\n", "vllm/__init__.py": ""}
    installed = write(tmp_path / "site", torch)
    file = {"path": "tests/test_a.py", "seconds": 2000, "sample": 0}
    plan = {"line": "0", "modes": {"upstream": {}}, "trees": {"upstream": "a"}, "files": [file]}
    files = {
        "tests/test_a.py": "import os\ndef test_x(): pass\n",
        "tests/conftest.py": "import torch\n",
        "pyproject.toml": "",
        "removed.json": '{"patched": [], "pristine": []}',
        "plan.json": json.dumps(plan),
    }
    kit, out = write(tmp_path / "kit", files), tmp_path / "out"
    argv = [
        "--kit",
        str(kit),
        "--out",
        str(out),
        "--work",
        str(tmp_path / "work"),
        "--isolation",
        isolation,
        *PATIENT,
    ]
    env = {**os.environ, "PYTHONPATH": f"{installed}:{ROOT / 'src'}"}
    subprocess.run([sys.executable, "-m", "vllm_series.baseline.device", *argv], env=env, check=True)
    run = Run.load(out / "upstream.json")
    assert run.counts() == {"passed": 1}
    assert run.fingerprint["isolation"] == ("fresh" if isolation == "auto" else "fork")


def interpreter(folder: Path, torch: str, version: str | None) -> Path:
    """An interpreter that has the given torch and a vllm of that version."""
    files = {"lib/torch/__init__.py": torch}
    if version is not None:
        files["lib/vllm/__init__.py"] = ""
        files[f"lib/vllm-{version}.dist-info/METADATA"] = f"Name: vllm\nVersion: {version}\n"
    write(folder, files)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "lib"} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


CARD = """
__version__ = "2.14.0"
class cuda:
    is_available = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda number: "NVIDIA H200")
"""


@pytest.mark.parametrize(
    ("torch", "version", "says"),
    [
        (TORCH, "0.33.0", "no NVIDIA GPU answers torch 0"),
        ("raise ImportError('libcudart.so.13')", "0.33.0", "has no torch (ImportError: libcudart.so.13)"),
        (CARD, None, "has no vLLM, and these are tests of 0.33.0"),
        (CARD, "0.32.0", "has vLLM 0.32.0, and these are tests of 0.33.0"),
    ],
)
def test_gpu_refuses_a_machine_that_cannot_run_it(
    tmp_path: Path, torch: str, version: str | None, says: str
) -> None:
    python = interpreter(tmp_path / "env", torch, version)
    argv = [sys.executable, "-m", "vllm_series.cli", "--root", str(ROOT), "baseline", "gpu", "0.33.0"]
    done = subprocess.run([*argv, "--python", str(python)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and says in done.stderr and "fix:" in done.stderr
    assert "gpu-kit 0.33.0" in done.stderr or "pip install vllm==0.33.0" in done.stderr


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0+dsa.1"])
def test_gpu_takes_the_lines_own_vllm(tmp_path: Path, version: str) -> None:
    python = interpreter(tmp_path / "env", CARD, version)
    assert card.require(python, "0.33.0").gpu == "NVIDIA H200"
    assert card.line_of(python, ["0.34.0", "0.33.0"]) == "0.33.0"


def test_the_interpreter_is_named_or_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHON", raising=False)
    other = write(tmp_path, {"python3": "#!/bin/sh\n"}) / "python3"
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path(sys.prefix) / 'bin'}:{tmp_path}")
    assert card.find_python(None) == other
    monkeypatch.setenv("PYTHON", str(other))
    assert card.find_python(None) == other
    with pytest.raises(UsageError, match="no program"):
        card.find_python("/nowhere/python")
