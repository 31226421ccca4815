"""`series install`: over an installed wheel and back, by hash; wrong or changed installations are refused."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import subprocess
import sys
import venv
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from tiny_upstream import Upstream

from vllm_series import cli
from vllm_series.cli_install import layer_of
from vllm_series.errors import CheckFailed, IntegrityError, UsageError, WouldLoseWork
from vllm_series.files import write_atomic
from vllm_series.install import environment, inplace, wheels
from vllm_series.install.environment import Environment, Installed
from vllm_series.wheel import repack
from vllm_series.wheel.uvtool import Uv, find_uv
from vllm_series.workspace import Workspace


@pytest.fixture
def at(upstream: Upstream, tmp_path: Path) -> Installed:
    """The tiny upstream's wheel, unpacked as an installer does it."""
    site = tmp_path / "site"
    with zipfile.ZipFile(upstream.wheel) as wheel:
        wheel.extractall(site)
    return Installed("1.2.0", site, site / "vllm-1.2.0.dist-info")


def content(at: Installed) -> dict[str, bytes]:
    return {
        path.relative_to(at.site).as_posix(): path.read_bytes()
        for path in at.site.rglob("*")
        if path.is_file()
    }


def test_on_and_off_again(at: Installed, upstream: Upstream) -> None:
    before = content(at)
    layer = layer_of(upstream.recipe())
    assert inplace.install(at, layer)
    now = content(at)
    assert now["vllm/envs.py"] == b"A = 1\nB = 2\n" and now["vllm/dsa/__init__.py"]
    assert now["vllm/_dsa_C.so"] and "vllm/old.py" not in now and "csrc/dsa/x.cu" not in now
    assert now["vllm/_version.py"] == before["vllm/_version.py"], "the package's version stays upstream's"
    assert json.loads(now["vllm/dsa/_provenance.json"])["version"] == "1.2.0+dsa.3"
    rows = inplace.rows_of((at.dist_info / "RECORD").read_bytes())
    assert {name for name, _, _ in rows} == set(now), "an installer must be able to remove all of it"
    assert all(inplace.record_hash(now[name]) == digest for name, digest, _ in rows if digest)

    assert not inplace.install(at, layer), "the second time there is nothing to do"
    (at.site / "vllm/dsa/__pycache__").mkdir()
    (at.site / "vllm/dsa/__pycache__/__init__.cpython-311.pyc").write_bytes(b"x")
    assert inplace.take_off(at)
    assert content(at) == before
    assert not (at.site / "vllm/dsa").exists()
    assert not inplace.take_off(at)


def test_another_version_replaces_the_first(at: Installed, upstream: Upstream) -> None:
    before = content(at)
    inplace.install(at, layer_of(upstream.recipe()))
    newer = upstream.recipe(overlay={"vllm/dsa/other.py": b"X = 1\n"}, kernels=None)
    assert inplace.install(at, layer_of(newer))
    assert (at.site / "vllm/dsa/other.py").is_file()
    assert not (at.site / "vllm/dsa/__init__.py").exists() and not (at.site / "vllm/_dsa_C.so").exists()
    inplace.take_off(at)
    assert content(at) == before


class Killed(BaseException):
    """Nothing in the code under test catches it, so what runs after it is what runs after a kill: nothing."""


def killed_at(write: int, action: str, at: Installed, layer: inplace.Layer) -> bool:
    """Run an action that ends before its n-th write; says whether it got that far."""
    done = 0

    def counted(path: Path, data: bytes | str, *, mode: int = 0o644) -> bool:
        nonlocal done
        if done == write:
            raise Killed
        done += 1
        return write_atomic(path, data, mode=mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inplace, "write_atomic", counted)
        try:
            inplace.install(at, layer) if action == "install" else inplace.take_off(at)
        except Killed:
            return True
    return False


@pytest.mark.parametrize("action", ["install", "undo"])
def test_a_killed_run_is_mended_by_the_next(at: Installed, upstream: Upstream, action: str) -> None:
    """Killed before each write in turn; then the install goes through, or upstream's files come back."""
    before, layer = content(at), layer_of(upstream.recipe())
    writes = 0
    while True:
        if action == "undo":
            inplace.install(at, layer)
        killed = killed_at(writes, action, at, layer)
        if writes % 2:
            inplace.take_off(at)
        else:
            inplace.install(at, layer)
            assert content(at)["vllm/envs.py"] == b"A = 1\nB = 2\n"
            inplace.take_off(at)
        assert content(at) == before, writes
        if not killed:
            break
        writes += 1
    assert writes >= (8 if action == "install" else 4)


@pytest.mark.parametrize("name", ["vllm/envs.py", "vllm/data.txt", "vllm/_C.so"])
def test_a_changed_installation_is_refused(at: Installed, upstream: Upstream, name: str) -> None:
    data = (at.site / name).read_bytes()
    (at.site / name).write_bytes(b"y" + data[1:])
    before = content(at)
    with pytest.raises(CheckFailed, match=f"is not the wheel of vLLM 1.2.0: {name}") as caught:
        inplace.install(at, layer_of(upstream.recipe()))
    assert "pip install --force-reinstall --no-deps vllm==1.2.0" in caught.value.fix
    assert content(at) == before


def test_a_changed_file_with_a_fitting_record_is_refused(at: Installed, upstream: Upstream) -> None:
    """Another fork's wheel of the same version: RECORD agrees with itself, but not with the pin."""
    data = b"A = 3\n"
    (at.site / "vllm/envs.py").write_bytes(data)
    record = at.dist_info / "RECORD"
    rows = inplace.rows_of(record.read_bytes())
    rows = [
        (n, inplace.record_hash(data), str(len(data))) if n == "vllm/envs.py" else (n, d, s)
        for n, d, s in rows
    ]
    record.write_text("".join(f'"{n}",{d},{s}\n' for n, d, s in rows))
    with pytest.raises(CheckFailed, match=r"vllm/envs\.py"):
        inplace.install(at, layer_of(upstream.recipe()))


def test_a_foreign_overlay_is_refused(at: Installed, upstream: Upstream) -> None:
    (at.site / "vllm/dsa").mkdir()
    (at.site / "vllm/dsa/__init__.py").write_text("mine\n")
    with pytest.raises(CheckFailed, match="is there already"):
        inplace.install(at, layer_of(upstream.recipe()))
    assert (at.site / "vllm/dsa/__init__.py").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": "1.1.0"}, "vLLM 1.1.0 is installed, the files are for 1.2.0"),
        ({"version": "1.2.0+dsa.2"}, "is a wheel of this series"),
        ({"editable": True}, "editable install"),
    ],
)
def test_other_installations_are_refused(at: Installed, upstream: Upstream, change: dict, why: str) -> None:
    before = content(at)
    with pytest.raises(UsageError, match=why.replace("+", r"\+")):
        inplace.install(dataclasses.replace(at, **change), layer_of(upstream.recipe()))
    assert content(at) == before


def test_edits_in_laid_files_are_not_lost(at: Installed, upstream: Upstream) -> None:
    before = content(at)
    inplace.install(at, layer_of(upstream.recipe()))
    (at.site / "vllm/dsa/__init__.py").write_text("edited\n")
    for action in (lambda: inplace.take_off(at), lambda: inplace.install(at, layer_of(upstream.recipe()))):
        with pytest.raises(WouldLoseWork, match=r"vllm/dsa/__init__\.py"):
            action()
    assert (at.site / "vllm/dsa/__init__.py").read_text() == "edited\n"
    inplace.take_off(at, force=True)
    assert content(at) == before


def test_damaged_backups_change_nothing(at: Installed, upstream: Upstream) -> None:
    inplace.install(at, layer_of(upstream.recipe()))
    (at.dist_info / "series/before/vllm/envs.py").write_text("damaged\n")
    now = content(at)
    with pytest.raises(IntegrityError, match="damaged; nothing was changed"):
        inplace.take_off(at)
    assert content(at) == now
    for text in (
        "{",
        "[]",
        '{"schema": 1}',
        '{"schema": 1, "state": "installed", "files": {"a": {}}}',
        "\x00",
    ):
        (at.dist_info / "series/journal.json").write_text(text)
        with pytest.raises(IntegrityError, match="cannot be read") as caught:
            inplace.take_off(at)
        assert "pip install --force-reinstall --no-deps vllm==1.2.0" in caught.value.fix


@pytest.mark.parametrize("name", ["METADATA", "RECORD"])
def test_an_interrupted_installer_is_named(
    at: Installed, upstream: Upstream, tmp_path: Path, name: str
) -> None:
    """Found and refused with what mends it; nothing is written."""
    (at.dist_info / name).unlink()
    (at.dist_info / "direct_url.json").write_text("{")
    python = tmp_path / "env/bin/python"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(tmp_path / "env")
    site = next((tmp_path / "env/lib").glob("python3*")) / "site-packages"
    shutil.copytree(at.site, site, dirs_exist_ok=True)
    found = environment.look(python).vllm
    assert found is not None and (found.version, found.editable) == ("1.2.0", False)
    before = content(found)
    with pytest.raises(CheckFailed, match=rf"vllm-1\.2\.0\.dist-info has no {name}") as caught:
        inplace.install(found, layer_of(upstream.recipe()))
    assert "pip install --force-reinstall --no-deps vllm==1.2.0" in caught.value.fix
    assert content(found) == before


@pytest.mark.parametrize("row", [b"vllm/envs.py,sha256=x,many\n", b"vllm/\xff,sha256=x,1\n"])
def test_a_damaged_record_is_refused(at: Installed, upstream: Upstream, row: bytes) -> None:
    with (at.dist_info / "RECORD").open("ab") as file:
        file.write(row)
    with pytest.raises(CheckFailed, match="is not the wheel"):
        inplace.install(at, layer_of(upstream.recipe()))


def test_real_environment(upstream: Upstream, tmp_path: Path, root: Path) -> None:
    """uv installs upstream's wheel; ours replaces it, is found as installed, and upstream's comes back."""
    uv = Uv(find_uv(Workspace(root)), tmp_path / "cache")
    python = uv.venv(tmp_path / "env", Path(sys.executable))
    env = environment.look(python)
    assert env.vllm is None
    recipe = upstream.recipe()
    ours = repack.repack(recipe, tmp_path / "dist", tmp_path / "state").path
    with pytest.raises(UsageError, match="has no vLLM whose dependencies"):
        wheels.replace(uv, env, ours)
    uv.run("pip", "install", "--python", python, "--no-deps", "--offline", upstream.wheel)
    env = environment.look(python)
    assert env.vllm and (env.vllm.version, env.vllm.editable, env.vllm.ours) == ("1.2.0", False, False)

    inplace.install(env.vllm, layer_of(recipe))
    asked = subprocess.run(
        [python, "-c", "import vllm.dsa; print(vllm.dsa.info())"], capture_output=True, text=True
    )
    assert asked.stdout == "{}\n", asked.stderr
    inplace.take_off(env.vllm)

    found = wheels.replace(uv, env, ours)
    assert found.version == "1.2.0+dsa.3" and found.ours and found.upstream == "1.2.0"
    (found.site / "vllm/envs.py").write_text("broken\n")
    with pytest.raises(CheckFailed, match=r"vllm/envs\.py"):
        wheels.check(found, ours, wheels.WheelName.parse(ours.name))
    back = wheels.replace(uv, environment.look(python), upstream.wheel)
    assert back.version == "1.2.0" and not (back.site / "vllm/dsa").exists()
    other = Environment(python, "3.11", Installed("1.1.0", back.site, back.dist_info))
    with pytest.raises(UsageError, match=r"has vLLM 1\.1\.0, the wheel is of 1\.2\.0"):
        wheels.replace(uv, other, ours)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--python", "/nowhere/python"], "is no Python"),
        (["--python", sys.executable], "environment of this tool"),
        (["0.33.0", "--undo"], "--undo finds out itself"),
        (["--force"], "--force belongs to --undo"),
        (["--no-kernels"], "--no-kernels belongs to --files"),
        (["0.99", "--python", "/nowhere/python"], "unknown line '0.99'"),
    ],
)
def test_wrong_calls(root: Path, arguments: list[str], why: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        cli.main(["--root", str(root), "install", *arguments])
    assert end.value.code == 2 and why in err.getvalue() and "fix: " in err.getvalue()
