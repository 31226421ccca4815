"""The torch environments: what their digest depends on, and errors that name what to do."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

from vllm_series import envs, runtime
from vllm_series.errors import UsageError
from vllm_series.git import Git
from vllm_series.workspace import Workspace

ROOT = Path(__file__).parents[2]


def checkout(tmp_path: Path, lock: str | None) -> Workspace:
    (tmp_path / "pins").mkdir()
    (tmp_path / "patches").mkdir()
    if lock is not None:
        (tmp_path / "pins/0.0.0.cpu.lock").write_text(lock)
    return Workspace(tmp_path)


def test_digest_follows_the_versions_and_not_the_comments(tmp_path: Path) -> None:
    ws = checkout(tmp_path, "# a\ntorch==2.14.1\n")
    first = envs.env_digest(ws, "0.0.0")
    envs.lock_file(ws, "0.0.0").write_text("# b\ntorch==2.14.1\n")
    assert envs.env_digest(ws, "0.0.0") == first
    envs.lock_file(ws, "0.0.0").write_text("# b\ntorch==2.14.2\n")
    assert envs.env_digest(ws, "0.0.0") != first


def test_missing_lock_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no versions") as caught:
        envs.torch_env(checkout(tmp_path, None), "0.0.0")
    assert "series baseline env 0.0.0 --relock YYYY-MM-DD" in caught.value.fix


def test_missing_uv_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_SERIES_UV", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no uv"):
        envs.find_uv(checkout(tmp_path, ""))


@pytest.mark.parametrize("path", sorted((ROOT / "pins").glob("*.cpu.lock")), ids=lambda path: path.name)
def test_locks_pin_every_package_once(path: Path) -> None:
    rows = [row for row in path.read_text().splitlines() if row and not row.startswith("#")]
    assert all(re.match(r"[\w.-]+==[\w.!+]+( ; .+)?$", row) for row in rows)
    plain = [row.partition("==")[0] for row in rows if " ; " not in row]
    assert len(plain) == len(set(plain))
    assert {"torch", "pytest", "pytest-reportlog", "pytest-timeout", "tblib", "transformers"} <= set(plain)


def test_requirements_are_read_from_the_sdist(tmp_path: Path) -> None:
    for name, text in {
        "common.txt": "numpy\n",
        "cuda.txt": "-r common.txt\nnumba == 0.65.0\ntorch==2\n",
    }.items():
        (tmp_path / name).write_text(text)
    with tarfile.open(tmp_path / "vllm-0.0.0.tar.gz", "w:gz") as archive:
        for name in ("common.txt", "cuda.txt"):
            archive.add(tmp_path / name, f"vllm-0.0.0/requirements/{name}")
    assert envs.common_requirements(tmp_path / "vllm-0.0.0.tar.gz").split("\n") == [
        "numpy",
        "numba == 0.65.0",
        "",
    ]


def test_site_takes_only_what_upstreams_source_lacks(tmp_path: Path) -> None:
    """A file that a patch deletes stays deleted; the overlay's own file is not replaced."""
    wheel, dest = tmp_path / "wheel", tmp_path / "site"
    for name in (
        "vllm/kept.py",
        "vllm/deleted.py",
        "vllm/_C.so",
        "vllm/_dsa_C.so",
        "vllm-1.dist-info/METADATA",
    ):
        (wheel / name).parent.mkdir(parents=True, exist_ok=True)
        (wheel / name).write_text("wheel")
    for name in ("vllm/kept.py", "vllm/_dsa_C.so"):
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        (dest / name).write_text("tree")
    runtime.lay_site(wheel, ["vllm/kept.py", "vllm/deleted.py"], dest)
    assert not (dest / "vllm/deleted.py").exists()
    assert (dest / "vllm/kept.py").read_text() == (dest / "vllm/_dsa_C.so").read_text() == "tree"
    assert (dest / "vllm/_C.so").samefile(wheel / "vllm/_C.so") and (
        dest / "vllm-1.dist-info/METADATA"
    ).exists()


@pytest.mark.slow
@pytest.mark.parametrize("line", ["0.33.0", "0.28.0"])
def test_real_site_differs_from_the_tree_by_the_wheels_own_files(line: str) -> None:
    ws = Workspace(ROOT)
    site = runtime.pristine_site(ws, line)
    tracked = set(Git(ws.odb).files(site.tree))
    assert (site.path / "vllm" / "_version.py").is_file()
    assert any(site.path.glob("vllm/*.abi3.so")) and any(site.path.glob("*.dist-info/METADATA"))
    assert {"tests/conftest.py", "pyproject.toml"} <= tracked
    assert all((site.path / name).exists() for name in tracked)
