"""`series verify` and the command line around it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from core_lab import TRAILERS, Project

from vllm_series import verify
from vllm_series.errors import CheckFailed

STEPS = [
    "pin",
    "import",
    "series",
    "apply",
    "lock",
    "lint",
    "anchors",
    "live",
    "upstreamed",
    "round trip",
    "compile",
]


def test_all_steps_run_and_leave_the_tree_alone(two: Project) -> None:
    two.edit("vllm/envs.py", "size = 1", "size = 5")
    result = two.series("verify", "--json").json
    assert result["ok"] is True
    assert [row["name"] for row in result["lines"]["0.9.0"]] == STEPS
    assert two.state() == "DIRTY", "verify works in throw-away trees"


def test_damaged_cache_without_network(two: Project) -> None:
    from vllm_series import fetch

    path = fetch.cached_path(two.ws, two.pin().source.sdist)
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert two.series("verify", code=6).out.count("FAIL") == 1


def test_wrong_commit_is_found_even_if_imported(two: Project) -> None:
    pin = two.root / "pins/0.9.0.toml"
    pin.write_text(pin.read_text().replace('commit = "a1b2c3d4e"', 'commit = "fffffff"'))
    step = two.series("verify", "--json", code=4).json["lines"]["0.9.0"][-1]
    assert step["name"] == "pin"
    assert step["exit_code"] == 4


def test_lock_of_other_patches(two: Project) -> None:
    path = two.patches / "change-backward.patch"
    path.write_bytes(path.read_bytes().replace(b"y = x - 2", b"y = x - 8"))
    out = two.series("verify", code=1).out
    assert "LOCK does not match the patches (change-backward.patch)" in out


def test_patch_that_does_not_compile(project: Project) -> None:
    project.apply()
    project.edit("vllm/envs.py", "y = x + 1", "y = (x + 1")
    project.commit(f"Break it\n\nWhy.\n\n{TRAILERS}")
    project.series("export", "0.9.0")
    out = project.series("verify", code=1).out
    assert "vllm/envs.py does not compile" in out


def test_overlay_that_does_not_compile(two: Project) -> None:
    (two.root / "overlay/vllm/dsa/bad.py").write_text("def f(:\n")
    assert "vllm/dsa/bad.py does not compile" in two.series("verify", code=1).out


@pytest.mark.parametrize(
    "text",
    ["type X = int\n", "def f[T](x: T) -> T: ...\n", "try:\n    pass\nexcept* ValueError:\n    pass\n"],
)
def test_syntax_newer_than_the_oldest_python_is_refused(text: str) -> None:
    with pytest.raises(CheckFailed, match="does not compile"):
        verify.compile_file(text.encode(), "a.py")
    verify.compile_file(b"match 1:\n    case 1:\n        pass\n", "a.py")


def test_two_lines_side_by_side(two: Project) -> None:
    import shutil

    shutil.copytree(two.patches, two.root / "patches/0.9.1")
    text = (two.root / "pins/0.9.0.toml").read_text().replace('line = "0.9.0"', 'line = "0.9.1"')
    (two.root / "pins/0.9.1.toml").write_text(text)
    lock = two.root / "patches/0.9.1/LOCK"
    lock.write_text(lock.read_text().replace('line = "0.9.0"', 'line = "0.9.1"'))
    result = two.series("verify", "--json").json
    assert list(result["lines"]) == ["0.9.1", "0.9.0"]
    (two.root / "patches/0.9.1/LOCK").unlink()
    result = two.series("verify", "--json", code=1).json
    assert all(row["ok"] for row in result["lines"]["0.9.0"])


def _command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_series.cli", *args], cwd=cwd, capture_output=True, text=True
    )


def test_the_real_command_line(two: Project, tmp_path: Path) -> None:
    done = _command("status", "--json", cwd=two.root / "patches")
    assert json.loads(done.stdout)["lines"]["0.9.0"]["state"] == "APPLIED"
    outside = _command("status", cwd=tmp_path / "files")
    assert outside.returncode == 2
    assert "not inside a checkout" in outside.stderr
    assert "--root" in outside.stderr
    wrong = _command("apply", "--nope", cwd=two.root)
    assert wrong.returncode == 2
    broken = _command("apply", "9", "--json", cwd=two.root)
    assert broken.returncode == 2
    assert json.loads(broken.stdout)["exit_code"] == 2
    assert "error: unknown line" in broken.stderr


def test_every_command_takes_json(two: Project) -> None:
    for args in (
        ["fetch"],
        ["status"],
        ["apply", "0.9.0"],
        ["export", "0.9.0"],
        ["lock"],
        ["verify"],
        ["lint"],
        ["pin", "list"],
    ):
        out = two.series(*args, "--json").out
        assert isinstance(json.loads(out), dict), args


def test_an_area_that_cannot_be_imported_does_not_stop_the_rest(
    two: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_series import cli

    def missing(name: str) -> object:
        raise ImportError("No module named 'somelib'")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    result = two.series("status")
    assert "the commands of cli_pin are missing" in result.err
