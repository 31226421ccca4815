"""`series doctor`: what it finds in an environment, and what it says is in the way."""

from __future__ import annotations

import io
import json
import shutil
import venv
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from vllm_series import cli, pins
from vllm_series.cli_doctor import in_short
from vllm_series.doctor import reach, report
from vllm_series.workspace import Workspace

H200 = {"name": "NVIDIA H200", "capability": "9.0"}


def doctor(root: Path, *arguments: str, code: int = 0) -> str:
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out), pytest.raises(SystemExit) as end:
        cli.main(["--root", str(root), "doctor", *arguments])
    assert end.value.code == code, out.getvalue()
    return out.getvalue()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The site-packages of an environment with nothing in it."""
    place = tmp_path_factory.mktemp("env")
    venv.EnvBuilder(symlinks=True, with_pip=False).create(place)
    yield next(place.glob("lib/python3*/site-packages"))


def python_of(site: Path) -> str:
    return str(site.parents[2] / "bin" / "python")


@pytest.fixture
def patched(site: Path, root: Path) -> Iterator[Path]:
    """The same with a vLLM that is the overlay, its version module, and a record of 0.33.0+dsa.1."""
    shutil.copytree(root / "overlay/vllm", site / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "vllm/__init__.py").write_text("")
    (site / "vllm/dsa/_provenance.json").write_text(json.dumps({"line": "0.33.0", "version": "0.33.0+dsa.1"}))
    (site / "vllm-0.33.0+dsa.1.dist-info").mkdir()
    (site / "vllm-0.33.0+dsa.1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+dsa.1\n"
    )
    (site / "vllm-0.33.0+dsa.1.dist-info/RECORD").write_text("")
    yield site
    shutil.rmtree(site / "vllm")
    shutil.rmtree(site / "vllm-0.33.0+dsa.1.dist-info")


def test_nothing_installed_and_no_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    text = doctor(root)
    assert "none: no environment is named" in text and "fix: scripts/build.sh 0.33.0" in text
    assert "fused_q      unavailable (no environment is named)" in text
    assert "\nwhich model reaches which feature: docs/features.md\n" in text, "no table without columns"


def test_an_environment_without_vllm(root: Path, site: Path) -> None:
    data = json.loads(doctor(root, "--python", python_of(site), "--json"))
    assert data["vllm"] is None and "error" in data["torch"]
    assert {row["state"] for row in data["features"].values()} == {"unavailable"}
    assert [row["problem"] for row in data["advice"]] == ["no vLLM is installed here"]


def test_a_relative_path_to_python(root: Path, patched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(patched.parents[2])
    data = json.loads(doctor(root, "--python", "bin/python", "--json"))
    assert data["python"]["path"] == python_of(patched) and data["line"] == "0.33.0"


def test_a_patched_vllm_without_torch(root: Path, patched: Path) -> None:
    data = json.loads(doctor(root, "--python", python_of(patched), "--json"))
    assert data["vllm"]["kind"] == "wheel of this series" and data["line"] == "0.33.0"
    assert set(data["features"]) >= {"overlap", "litetopk", "litedsa", "fused_q", "logits_slab"}
    assert all(row["state"] in ("off", "declined", "unavailable") for row in data["features"].values())
    problems = " ".join(row["problem"] for row in data["advice"])
    assert "torch does not load" in problems
    text = doctor(root, "--python", python_of(patched))
    assert "0.33.0+dsa.1, wheel of this series" in text and "fused_q" in text
    assert len(text.splitlines()) <= 45, "one screen"


def test_an_interrupted_install_is_a_fault(root: Path, patched: Path) -> None:
    folder = patched / "vllm-0.33.0+dsa.1.dist-info/series"
    folder.mkdir()
    (folder / "journal.json").write_text(json.dumps({"schema": 1, "state": "installing", "files": {}}))
    text = doctor(root, "--python", python_of(patched), code=1)
    assert "! `series install` was interrupted while installing" in text
    assert "fix: series install --undo" in text


@pytest.mark.parametrize("name", ["METADATA", "RECORD"])
def test_an_interrupted_installer_is_a_fault(root: Path, patched: Path, name: str) -> None:
    (patched / "vllm-0.33.0+dsa.1.dist-info" / name).unlink()
    data = json.loads(doctor(root, "--python", python_of(patched), "--json", code=1))
    assert (data["vllm"]["version"], data["line"]) == ("0.33.0+dsa.1", "0.33.0")
    (row,) = data["advice"]
    assert row["problem"].endswith(f"vllm-0.33.0+dsa.1.dist-info has no {name}")
    assert row["fix"].startswith("pip install --force-reinstall --no-deps vllm==0.33.0")


def test_torch_alone_is_named_where_it_is_what_is_missing(root: Path, patched: Path) -> None:
    """As a wheel without its dependencies: vLLM imports torch, so vllm.dsa does not load either."""
    (patched / "vllm/__init__.py").write_text("import torch\n")
    data = json.loads(doctor(root, "--python", python_of(patched), "--json"))
    assert [row["problem"] for row in data["advice"]] == [
        "torch does not load: ModuleNotFoundError: No module named 'torch'"
    ]


def test_what_keeps_the_series_from_loading_is_named(root: Path, patched: Path) -> None:
    assert judged(root, dsa={"error": "OSError: no libfoo"}) == ["vllm.dsa does not load: OSError: no libfoo"]


def judged(root: Path, **changes: Any) -> list[str]:
    """The problems that are named for a healthy H200 environment with ``changes``."""
    ws = Workspace(root)
    lines = {pins.load_pin(ws, line).version: pins.load_pin(ws, line) for line in pins.lines(ws)}
    current = lines["0.33.0"]
    data: dict[str, Any] = {
        "python": {"path": "python", "version": "3.12.3"},
        "vllm": {"version": current.wheel_version, "upstream": "0.33.0", "kind": "", "problem": ""},
        "torch": {"version": f"{current.torch}+cu130", "cuda": "13.0", "cards": [H200]},
        "plugins": [],
        "dsa": {
            "version": current.wheel_version,
            "kernels": {"loaded": True, "reason": ""},
            "features": {"fused_q": {"state": "active", "reason": ""}},
        },
    } | changes
    return [row["problem"] for row in report.judge(ws, lines, data)["advice"]]


def test_a_healthy_machine_gets_no_advice(root: Path) -> None:
    assert judged(root) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"torch": {"version": "2.11.0", "cuda": "13.0", "cards": [H200]}},
            "torch is 2.11.0, vLLM 0.33.0 pins",
        ),
        ({"torch": {"version": "2.14.0+cpu", "cuda": None, "cards": []}}, "torch 2.14.0+cpu is a CPU build"),
        (
            {
                "torch": {
                    "version": "2.14.0",
                    "cuda": "13.0",
                    "cards": [{"name": "A100", "capability": "8.0"}],
                }
            },
            "no kernel of this series is built for compute capability 8.0",
        ),
        (
            {"plugins": [{"name": "vllm-omni", "requires": "vllm==0.32.0"}]},
            "vllm-omni requires vllm==0.32.0, installed is 0.33.0+dsa.1",
        ),
        ({"plugins": [{"name": "fits", "requires": "vllm==0.33.0"}]}, None),
        (
            {"vllm": {"version": "0.31.0", "upstream": "0.31.0", "kind": "", "problem": ""}},
            "this series has no line for vLLM 0.31.0",
        ),
        (
            {"dsa": {"error": "upstream's vLLM, without this series"}},
            "upstream's vLLM, without this series is installed",
        ),
    ],
)
def test_what_is_in_the_way_is_named(root: Path, changes: dict[str, Any], problem: str | None) -> None:
    found = judged(root, **changes)
    if problem is None:
        assert found == []
    else:
        assert any(row.startswith(problem) for row in found), found


def test_the_table_of_models_is_that_of_the_documentation(root: Path) -> None:
    rows = {model.name: model for model in reach.models(root)}
    assert rows["DeepSeek-V3.2, GLM-5.x"].on("0.33.0", "fused_q") == "yes"
    shipped = {path.parent.name for path in (root / "overlay/vllm/dsa").glob("*/feature.py")}
    assert [set(model.features) for model in rows.values()] == [shipped] * len(rows)
    words = {in_short(said) for model in rows.values() for said in model.features.values()}
    assert words <= {"yes", "no", "off", "declines", "partly"}


def test_cells_that_name_one_line() -> None:
    model = reach.Model("M", "both", {"a": "0.33.0", "b": "declines (why)"})
    assert (model.on("0.33.0", "a"), model.on("0.28.0", "a")) == ("yes", "no: not on 0.28.0")
    assert model.on("0.28.0", "b") == "declines (why)" and model.on("0.28.0", "new") == ""
    assert reach.Model("M", "0.33.0", {"a": "yes"}).on("0.28.0", "a") == "no: not on 0.28.0"
