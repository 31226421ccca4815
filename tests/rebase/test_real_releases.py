"""The rebase on real releases of vLLM: two pairs, every state, and a whole new line with a conflict edited
by script."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rebase_lab import Index, Lab

from vllm_series import importer, pins
from vllm_series.git import Git
from vllm_series.rebase import table, trial
from vllm_series.workspace import Workspace

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
RELEASES = ("0.28.0", "0.29.0", "0.30.0")
STATES = {
    "mla-forward.patch": "UNREACHED",
    "indexer-forward.patch": "UNREACHED",
    "v32-indexer-forward.patch": "ANCHOR_LOST",
    "indexer-op.patch": "CLEAN",
    "prefill-chunks.patch": "CLEAN",
    "registry-entry.patch": "CONFLICT",
    "env-neighbour.patch": "MERGED",
    "eager-scratch.patch": "TARGET_GONE",
    "batch-invariant.patch": "TARGET_RENAMED",
    "layernorm-import.patch": "UPSTREAMED",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A checkout with the pins of three releases; the scratch patches of this folder are line 0.28.0."""
    root = tmp_path_factory.mktemp("real")
    shutil.copytree(ROOT / "pins", root / "pins", ignore=shutil.ignore_patterns("0.33.0*", "toolchain"))
    for pin in (HERE / "pins").glob("*.toml"):
        shutil.copy(pin, root / "pins")
    shutil.copytree(HERE / "scratch", root / "patches/0.28.0")
    (root / "overlay").mkdir()
    return Workspace(root)


@pytest.fixture
def lab(checkout: Workspace) -> Lab:
    return Lab(checkout.root, Index(), dict(os.environ))


def test_two_pairs_as_the_page_says(checkout: Workspace) -> None:
    """States, text and notes of both pairs are those that docs/rebase.md was made from."""
    recorded = json.loads((ROOT / table.RESULTS).read_text())["chains"][-1]["pairs"][:2]
    steps = trial.steps_in(checkout, "0.28.0", HERE / "scratch")
    measured = table.chain(checkout, RELEASES, steps)
    assert [row["patches"] for row in measured] == [row["patches"] for row in recorded]
    assert {name: row["state"] for name, row in measured[0]["patches"].items()} == STATES


def test_the_shipped_patches_fare_as_recorded(checkout: Workspace) -> None:
    """The patches of the oldest line on both pairs; how far a hunk moved is left open, other patches may
    move it."""
    recorded = json.loads((ROOT / table.RESULTS).read_text())["chains"][0]["pairs"][:2]
    steps = trial.steps_in(checkout, "0.28.0", ROOT / "patches/0.28.0")
    measured = table.chain(checkout, RELEASES, steps)
    for have, want in zip(measured, recorded, strict=True):
        names = have["patches"].keys() & want["patches"].keys()
        assert {"envs.patch", "startup.patch"} <= names
        for name in names:
            assert _kind(have["patches"][name]) == _kind(want["patches"][name]), (name, have["patches"][name])


@pytest.fixture
def clone(checkout: Workspace, tmp_path: Path) -> tuple[Path, str]:
    """A clone of upstream made from two sdists, one commit each; the second one's id."""
    place = Git(tmp_path)
    place.run("init", "-q", "-b", "main")
    bases = _imported(checkout, RELEASES[:2])
    place.run("fetch", "-q", str(checkout.odb), *bases)
    tip = ""
    for version, base in zip(RELEASES, bases, strict=False):
        parent = ("-p", tip) if tip else ()
        tip = place.out("commit-tree", f"{base}^{{tree}}", *parent, "-m", f"Release {version}").strip()
        place.run("update-ref", f"refs/tags/v{version}", tip)
    place.run("update-ref", "refs/heads/main", tip)
    return tmp_path, tip


def _imported(checkout: Workspace, versions: tuple[str, ...]) -> list[str]:
    return [importer.import_pin(checkout, pins.load_pin(checkout, version)) for version in versions]


def test_to_a_commit_of_a_clone_of_real_sources(lab: Lab, clone: tuple[Path, str]) -> None:
    """A commit gives the states of the release with the same files, and names the commit that changed a
    target."""
    place, tip = clone
    args = ("rebase", "0.28.0", "--to", tip, "--git", str(place), "--report", "--json")
    done = lab.run(*args)
    assert done.code == 3 and done.json["to"]["commit"] == tip
    assert done.states() == STATES
    changes = {
        line.split(" ", 1)[1] for row in done.json["patches"] for t in row["targets"] for line in t["commits"]
    }
    assert changes == {"Release 0.29.0"}


def _kind(row: dict[str, str]) -> str:
    return "strict" if row["state"] in {"CLEAN", "OFFSET"} else row["state"]


@pytest.fixture
def tidy(checkout: Workspace) -> Iterator[None]:
    yield
    for place in (checkout.root / "build").glob("*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(place)


@pytest.mark.usefixtures("tidy")
def test_a_new_line_with_every_decision(lab: Lab) -> None:
    """0.28.0 to 0.29.0: stops at each patch that needs a person, takes edits and decisions, ends with a
    line."""
    lab.ok("lock", "0.28.0")
    stop = lab.run("rebase", "0.28.0", "--to", "0.29.0", "--drop", "v32-indexer-forward.patch")
    assert stop.code == 3 and "mla-forward.patch: UNREACHED" in stop.err
    assert "DeepseekV32ForCausalLM is vllm.models.deepseek_v32" in stop.err
    stop = lab.run("rebase", "--continue", "--drop", "mla-forward.patch", "--accept", "indexer-forward.patch")
    assert stop.code == 3 and "registry-entry.patch: CONFLICT" in stop.err
    file = lab.tree("0.29.0") / "vllm/model_executor/models/registry.py"
    text = file.read_text()
    start, middle, end = (text.index(mark) for mark in ("<<<<<<< ", "=======\n", ">>>>>>> "))
    mine = text[text.index("\n", start) + 1 : middle].replace(
        '"DeepseekV32ForCausalLM",\n    )', '"Other",\n    )'
    )
    file.write_text(text[:start] + mine + text[text.index("\n", end) + 1 :])
    stop = lab.run("rebase", "--continue")
    assert stop.code == 3 and "env-neighbour.patch: MERGED" in stop.err
    stop = lab.run("rebase", "--continue", "--accept", "env-neighbour.patch")
    assert stop.code == 3 and "eager-scratch.patch: TARGET_GONE" in stop.err
    stop = lab.run("rebase", "--continue", "--drop", "eager-scratch.patch")
    assert stop.code == 3 and "determinism/batch_invariant.py" in stop.err
    done = lab.ok("rebase", "--continue", "--accept", "batch-invariant.patch", "--json")
    rows = {row["patch"]: row["decision"] for row in done.json["patches"]}
    assert rows["registry-entry.patch"] == "resolved" and rows["indexer-op.patch"] == "adopted"
    assert rows["layernorm-import.patch"] == "recorded in upstreamed.toml"
    there = {path.name for path in (lab.root / "patches/0.29.0").glob("*.patch")}
    kept = {name for name, decision in rows.items() if decision in {"adopted", "accepted", "resolved"}}
    assert there == kept and len(kept) == 6
    checked = lab.run("verify", "0.29.0", "--json").json["lines"]["0.29.0"]
    failed = {step["name"] for step in checked if not step["ok"]}
    assert failed == {"live"}, checked  # the accepted UNREACHED patch stays visible as what it is
