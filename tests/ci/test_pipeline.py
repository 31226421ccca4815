"""Buildkite's pipeline: a snapshot, which a pre-commit hook validates; every step is one that runs here."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from vllm_series import cli
from vllm_series.ci import pipeline, report, steps
from vllm_series.ci.shard import shard
from vllm_series.errors import CheckFailed, UsageError
from vllm_series.workspace import Workspace


@pytest.fixture(scope="module")
def ws(root: Path) -> Workspace:
    return Workspace(root)


@pytest.fixture(scope="module")
def rows(ws: Workspace) -> list[dict]:
    data = yaml.safe_load(pipeline.render(steps.steps(ws)))
    return [row for group in data["steps"] for row in group["steps"]]


def test_snapshot(ws: Workspace, root: Path) -> None:
    stored = (root / "tests/ci/pipeline.yml").read_text()
    made = pipeline.render(steps.steps(ws))
    assert made == stored, "if this is meant: series ci pipeline > tests/ci/pipeline.yml"


def first_step(root: Path, place: Path, queues: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the static step's command as an agent does, where `buildkite-agent` writes down its call."""
    (step,) = yaml.safe_load((root / ".buildkite/pipeline.yml").read_text())["steps"]
    called = place / "called"
    agent = place / "buildkite-agent"
    agent.write_text(f'#!/bin/sh\necho "$*" >{called}\n[ -s "$3" ]\n')
    agent.chmod(0o755)
    env = os.environ | {"PATH": f"{place}:{os.environ['PATH']}", "SERIES_GPU_QUEUES": queues}
    command = ["/bin/bash", "-e", "-c", step["command"]]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False), called


def test_static_step_uploads_the_generated_pipeline(ws: Workspace, root: Path, tmp_path: Path) -> None:
    done, called = first_step(root, tmp_path, "hopper")
    assert done.returncode == 0, done.stderr
    assert called.read_text() == "pipeline upload build/pipeline.yml\n"
    assert (root / "build/pipeline.yml").read_text() == pipeline.render(steps.steps(ws, ["hopper"]))


def test_a_pipeline_that_cannot_be_made_fails_the_build(root: Path, tmp_path: Path) -> None:
    """An agent uploads an empty input as a pipeline without steps, and the build passes."""
    done, called = first_step(root, tmp_path, "mars")
    assert done.returncode == 2 and "no GPU queue is named mars" in done.stderr
    assert not called.exists()


def test_keys_and_dependencies(rows: list[dict]) -> None:
    keys = [row["key"] for row in rows]
    assert len(set(keys)) == len(keys)
    for row in rows:
        assert re.fullmatch(r"[a-zA-Z0-9_:-]+", row["key"]), "Buildkite takes no other letters"
        assert {one["step"] for one in row.get("depends_on", ())} <= set(keys)
        assert "$" not in str(row), "Buildkite would replace it at upload"


def test_commands_are_files_of_the_checkout(rows: list[dict], root: Path) -> None:
    for row in rows:
        script = root / row["command"].split()[0]
        assert script.is_file() and script.stat().st_mode & 0o100, row["command"]


def test_every_stage_of_the_tests_is_in_a_step(rows: list[dict], root: Path) -> None:
    listed = subprocess.run(
        ["bash", str(root / "scripts/test.sh"), "--list"], capture_output=True, text=True, check=True
    )
    stages = re.findall(r"^  (\w+) +\d+ min", listed.stdout, re.MULTILINE)
    commands = [row["command"] for row in rows]
    named = {stage for one in commands for stage in re.findall(r"--only ([\w,]+)", one)}
    covered = {stage for names in named for stage in names.split(",")}
    for stage, prefix in (("verify", "ci/verify.sh"), ("overlay", "scripts/lib/run.sh series overlay-test")):
        if any(one.startswith(prefix) for one in commands):
            covered.add(stage)
    assert len(stages) >= 7 and set(stages) == covered


def test_lines_are_those_of_the_pins(rows: list[dict], root: Path) -> None:
    for path in (root / "pins").glob("*.toml"):
        line = path.stem.replace(".", "_")
        for name in ("verify", "overlay", "build", "rebuild", "upstream", "gpu-hopper", "gpu-blackwell"):
            assert any(row["key"] == f"{name}-{line}" for row in rows), (name, line)


def test_queues_without_agents_are_left_out(ws: Workspace) -> None:
    assert not [one for one in steps.steps(ws, []) if one.queue != steps.CPU_QUEUE]
    assert {one.queue for one in steps.steps(ws, ["blackwell"])} == {steps.CPU_QUEUE, "blackwell"}
    with pytest.raises(UsageError, match="no GPU queue is named mars"):
        steps.steps(ws, ["mars"])


@pytest.mark.parametrize(
    ("given", "tags"),
    [
        ("none", set()),
        ("", set()),
        (" hopper , blackwell,", {"hopper", "blackwell"}),
        ("hopper-x2", {"hopper-x2"}),
    ],
)
def test_the_variable_that_names_the_queues(
    root: Path, capsys: pytest.CaptureFixture[str], given: str, tags: set[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--root", str(root), "ci", "pipeline", "--gpu-queues", given])
    assert end.value.code == 0
    data = yaml.safe_load(capsys.readouterr().out)
    queues = {row["agents"]["queue"] for group in data["steps"] for row in group["steps"]}
    assert queues == tags | {"default"}


def test_ci_run_is_built_from_steps(ws: Workspace, root: Path) -> None:
    called = re.search(r"^ci/local\.sh (.*)$", (root / ".ci/run").read_text(), re.MULTILINE)
    assert called
    known = {step.key: step.command for step in steps.local_steps(ws)}
    builds = [f"scripts/build.sh {line}" for line in ("0.33.0", "0.28.0")]
    assert [known[key] for key in called[1].split()] == [*builds, "scripts/test.sh"]


def test_local_run_stops_at_the_first_failure(
    tmp_path: Path, ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(key: str, command: str, soft: int | None = None) -> steps.Step:
        return steps.Step(key, "", key, f"cd '{tmp_path}' && {command}", soft_exit=soft)

    rows = [row("one", "touch one"), row("soft", "exit 3", 3), row("two", "exit 5"), row("three", "touch 3")]
    monkeypatch.setattr(steps, "local_steps", lambda _: rows)
    with pytest.raises(CheckFailed, match="step two failed with 5"):
        steps.run(ws, ["one", "soft", "two", "three"])
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    with pytest.raises(UsageError, match="no step four"):
        steps.run(ws, ["one", "four"])


@pytest.mark.parametrize("of", [1, 3, 7])
def test_shards_have_each_file_once_and_are_level(of: int) -> None:
    seconds = {f"tests/test_{n}.py": float(5 + n * n % 97) for n in range(60)}
    parts = [shard(seconds, index, of) for index in range(of)]
    assert sorted(name for part in parts for name in part) == sorted(seconds)
    loads = [sum(seconds[name] for name in part) for part in parts]
    assert max(loads) - min(loads) <= max(seconds.values())


def test_more_jobs_than_files() -> None:
    assert [shard({"a": 1.0}, index, 3) for index in range(3)] == [["a"], [], []]


@pytest.mark.parametrize("script", ["rebuild.sh", "gpu.sh"])
def test_a_missing_wheel_is_named(root: Path, tmp_path: Path, script: str) -> None:
    """The scripts in a folder without dist/: they name the step that makes the wheel."""
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / script).write_text((root / "ci" / script).read_text())
    command = ["bash", str(tmp_path / "ci" / script), "0.33.0"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=False)
    assert done.returncode == 2 and "ci/local.sh build-0.33.0" in done.stderr


def test_report_has_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILDKITE_BUILD_ID", "0a-1")
    assert report.markdown(tmp_path) == "Nothing to report.\n"
    for name, text in {
        "refresh/0.33.0.patch": "diff",
        "baseline/reports/0.33.0-job-0/0.33.0-off.md": "### off\nequal",
        "baseline/reports/0.33.0-job-1/0.33.0-off.md": "### off of job 1",
        "canary/canary.md": "### canary",
        "gpu-results/gpu-hopper-0_33_0/gpu-suite/0.33.0-h200.json": json.dumps(
            {
                "line": "0.33.0",
                "card": "h200",
                "rows": [{"case": "fused_q tests", "state": "ok", "seconds": 61.2, "reason": ""}],
            }
        ),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "gpu-results/gpu-suite").mkdir()
    (tmp_path / "gpu-results/gpu-suite/killed.json").write_text('{"rows": [')
    text = report.markdown(tmp_path)
    assert (
        "download build/refresh/0.33.0.patch . --build 0a-1 && git apply build/refresh/0.33.0.patch\n" in text
    )
    assert "    scripts/lib/run.sh series ci refresh 0.33.0 && git apply build/refresh/0.33.0.patch\n" in text
    assert "### off\nequal\n" in text and "### off of job 1" in text and "### canary" in text
    assert "| fused_q tests | ok | 61 |  |" in text
    assert "#### gpu-results/gpu-suite/killed.json cannot be read" in text
