"""`series pin add` against a loopback index."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from core_lab import COMMIT, FILES, Index, Project, die_in_child, make_sdist, make_wheel

from vllm_series import files, lock, pin_add
from vllm_series.pins import load_pin


@pytest.fixture
def release(bare: Project) -> Project:
    """Release 0.10.0 with an sdist and two wheels."""
    make_sdist(bare.files, "0.10.0")
    for platform in ("x86_64", "aarch64"):
        make_wheel(bare.files, "0.10.0", platform)
    return bare


def test_new_pin_is_complete_and_verifies(release: Project, index: Index) -> None:
    result = release.series("pin", "add", "0.10.0", "--json").json
    assert result["equal_files"] == {"x86_64": 9, "aarch64": 9}
    pin = load_pin(release.ws, "0.10.0")
    assert (pin.source.commit, pin.torch, pin.role, pin.dsa) == (COMMIT, "2.14.0", "candidate", 1)
    assert (pin.deepgemm_repository, pin.deepgemm_commit) == (
        "some/DeepGEMM",
        "0820030756945b2daec208e8e8255268360f337d",
    )
    assert set(pin.wheels) == {"x86_64", "aarch64"}
    text = (release.root / "pins/0.10.0.toml").read_text()
    assert "# must be the commit id in the sdist's vllm/_version.py" in text
    release.series("verify", "0.10.0")
    release.series("apply", "0.10.0")
    assert "0.10.0" in release.series("pin", "list").out


@pytest.mark.parametrize("write", ["series", "LOCK", "0.10.0.toml"])
def test_killed_between_its_files(
    release: Project, index: Index, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """Killed before each of the three files that it writes: the same command again does all of it."""

    def child(die: Callable[[], None]) -> None:
        def writing(path: Path, data: bytes | str) -> bool:
            if path.name == write:
                die()
            return files.write_atomic(path, data)

        monkeypatch.setattr(pin_add, "write_atomic", writing)
        monkeypatch.setattr(lock, "write_atomic", writing)
        pin_add.add(release.ws, "0.10.0")

    assert os.WIFSIGNALED(die_in_child(child))
    release.series("pin", "add", "0.10.0")
    release.series("verify", "0.10.0")


def test_a_pin_that_is_there_is_not_overwritten(release: Project, index: Index) -> None:
    before = (release.root / "pins/0.9.0.toml").read_bytes()
    assert "is there already" in release.series("pin", "add", "0.9.0", code=2).err
    assert (release.root / "pins/0.9.0.toml").read_bytes() == before


def _nothing_written(project: Project) -> None:
    assert sorted(p.name for p in (project.root / "pins").iterdir()) == ["0.9.0.toml"]
    assert sorted(p.name for p in (project.root / "patches").iterdir()) == ["0.9.0"]


def test_missing_release_and_no_version(release: Project, index: Index) -> None:
    assert "has no vLLM 0.11.0 (newest: 0.9.0, 0.10.0)" in release.series("pin", "add", "0.11.0", code=2).err
    assert "not a version" in release.series("pin", "add", "newest", code=2).err
    _nothing_written(release)


def test_yanked_release(release: Project, index: Index) -> None:
    index.yanked = {"vllm-0.10.0.tar.gz"}
    assert "was yanked (broken)" in release.series("pin", "add", "0.10.0", code=2).err
    _nothing_written(release)
    release.series("pin", "add", "0.10.0", "--yanked")


def test_sdist_without_wheel_and_wheel_without_sdist(release: Project, index: Index) -> None:
    for path in release.files.glob("vllm-0.10.0*.whl"):
        path.rename(path.with_suffix(".off"))
    assert "has a sdist but no x86_64 or aarch64 wheel" in release.series("pin", "add", "0.10.0", code=2).err
    for path in release.files.glob("*.off"):
        path.rename(path.with_suffix(".whl"))
    (release.files / "vllm-0.10.0.tar.gz").unlink()
    assert "has no sdist" in release.series("pin", "add", "0.10.0", code=2).err
    _nothing_written(release)


def test_wheel_that_was_not_built_from_the_sdist(release: Project, index: Index) -> None:
    make_wheel(release.files, "0.10.0", "x86_64", {**FILES, "vllm/envs.py": "other\n"})
    result = release.series("pin", "add", "0.10.0", code=4)
    assert "1 files differ from the sdist (vllm/envs.py)" in result.err
    _nothing_written(release)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("requirements/cuda.txt", "no torch pin"),
        ("cmake/external_projects/deepgemm.cmake", "no DeepGEMM commit"),
    ],
)
def test_release_that_lost_a_pin(release: Project, index: Index, path: str, message: str) -> None:
    make_sdist(release.files, "0.10.0", {**FILES, path: ""})
    assert message in release.series("pin", "add", "0.10.0", code=4).err
    _nothing_written(release)


def test_index_without_hashes_and_no_network(
    release: Project, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.tell_hash = False
    assert "does not tell the sha256" in release.series("pin", "add", "0.10.0", code=6).err
    monkeypatch.setenv("VLLM_SERIES_INDEX", "http://127.0.0.1:9/simple")
    assert "cannot reach" in release.series("pin", "add", "0.10.0", code=6).err
    _nothing_written(release)


def test_pins_of_this_repository_are_what_pin_add_writes(checkout: Path) -> None:
    """The template of `pin add` and the pins in the repository do not drift apart."""
    import tomllib

    from vllm_series.pin_add import render
    from vllm_series.workspace import Workspace

    for line in ("0.28.0", "0.33.0"):
        pin = load_pin(Workspace(checkout), line)
        assert tomllib.loads(render(pin, pin.source.tree)) == tomllib.loads(pin.path.read_text())
