"""An applied tree knows its line, and git does not see the file that says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from vllm_series import identity
from vllm_series.git import Git
from vllm_series.pins import load_pin
from vllm_series.workspace import Workspace


def tree_of(root: Path, place: Path) -> Path:
    """A git work tree that holds nothing but the overlay package."""
    (place / "vllm").mkdir(parents=True)
    subprocess.run(["cp", "-r", str(root / "overlay" / "vllm" / "dsa"), str(place / "vllm")], check=True)
    for cache in place.rglob("__pycache__"):
        subprocess.run(["rm", "-r", str(cache)], check=True)
    git = Git(place)
    git.run("init", "-q", "--template=")
    git.run("add", "-A")
    git.run("commit", "-q", "-m", "tree")
    return place


def test_the_tree_says_its_line_and_stays_clean(root: Path, tmp_path: Path) -> None:
    tree = tree_of(root, tmp_path / "tree")
    for line in ("0.28.0", "0.33.0"):
        pin = load_pin(Workspace(root), line)
        identity.write(tree, pin)
        identity.write(tree, pin)
        assert Git(tree).out("status", "--porcelain", "--untracked-files=all") == ""
        assert (tree / ".git" / "info" / "exclude").read_text().count(identity.RECORD) == 1
        done = subprocess.run(
            [sys.executable, "-B", "-m", "vllm.dsa", "--json"],
            cwd=tree,
            capture_output=True,
            text=True,
            check=True,
        )
        data = json.loads(done.stdout)
        assert (data["line"], data["version"]) == (line, pin.wheel_version)
        assert (data["series_version"], data["upstream_commit"]) == (str(pin.dsa), pin.source.commit)
        assert data["provenance"]["kind"] == "source tree"


def test_exclude_rows_of_the_user_are_kept(root: Path, tmp_path: Path) -> None:
    tree = tree_of(root, tmp_path / "tree")
    exclude = tree / ".git" / "info" / "exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text("*.mine")
    identity.write(tree, load_pin(Workspace(root), "0.33.0"))
    assert exclude.read_text() == f"*.mine\n/{identity.RECORD}\n"


def test_a_tree_without_the_overlay_gets_nothing(root: Path, tmp_path: Path) -> None:
    identity.write(tmp_path, load_pin(Workspace(root), "0.33.0"))
    assert list(tmp_path.iterdir()) == []
