"""--git, canary, bisect, review and the table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from rebase_lab import FILES, NEWER, Lab, changed
from test_session import CLASH, HOOK, IDX, LAYER, MERGE, OFFSET, SELECT, make

from vllm_series.errors import CheckFailed
from vllm_series.rebase import table
from vllm_series.rebase.bisect import SKIP, search

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of upstream with two releases and a commit after them."""
    place = tmp_path / "clone"
    place.mkdir()
    git = ["git", "-C", str(place), "-c", "user.name=Up", "-c", "user.email=up@example.org"]
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    for files, subject, tag in (
        (FILES, "Release 1.0.0", "v1.0.0"),
        (OFFSET, "Import sys for later", ""),
        ({**OFFSET, **NEWER}, "Run the new model", "v1.1.0"),
        (
            changed(IDX, "    return best\n", "    return best[:]\n", {**OFFSET, **NEWER}),
            "Copy the result",
            "",
        ),
    ):
        for path, text in files.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_text(text)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", subject], check=True)
        if tag:
            subprocess.run([*git, "tag", tag], check=True)
    return place


def test_a_clone_gives_upstreams_commits(lab: Lab, clone: Path) -> None:
    make(lab).index.publish("1.1.0", {**OFFSET, **NEWER})
    done = lab.run("rebase", "1.0.0", "--to", "1.1.0", "--report", "--json", "--git", str(clone))
    target = done.json["patches"][0]["targets"][0]
    assert target["path"] == IDX and [row.split(" ", 1)[1] for row in target["commits"]] == [
        "Import sys for later"
    ]
    text = lab.run("rebase", "1.0.0", "--to", "1.1.0", "--report", "--git", f"file://{clone}").out
    assert "Upstream's commits to vllm/layers/indexer.py:" in text and "Import sys for later" in text


def test_to_a_commit_of_a_clone(lab: Lab, clone: Path) -> None:
    """A commit has no release: patches and tree go to build/, no pin and no line is made."""
    make(lab)
    tip = subprocess.run(
        ["git", "-C", str(clone), "rev-parse", "main"], capture_output=True, text=True
    ).stdout.strip()
    for name in (tip, "main", tip[:10]):
        done = lab.run("rebase", "1.0.0", "--to", name, "--git", str(clone), "--report", "--json")
        assert done.json["to"]["commit"] == tip
        assert done.states() == {"hook.patch": "MERGED", "layer.patch": "UNREACHED", "wide.patch": "OFFSET"}
    args = ("--accept", "hook.patch", "--drop", "layer.patch")
    lab.ok("rebase", "1.0.0", "--to", "main", "--git", f"file://{clone}", *args)
    name = f"git-{tip[:12]}"
    assert sorted(p.name for p in (lab.root / "build" / f"{name}.patches").iterdir()) == [
        "hook.patch",
        "series",
        "wide.patch",
    ]
    text = (lab.tree(name) / IDX).read_text()
    assert "best = list(best)" in text and "return best[:]" in text and "import sys" in text
    assert not list((lab.root / "pins").glob("git-*")) and not (lab.root / "patches" / name).exists()


def test_canary(lab: Lab, tmp_path: Path) -> None:
    make(lab)
    same = lab.ok("canary", "--json")
    assert same.json["patches"] == [] and "on the newest release" in same.json["notes"][0]
    lab.index.publish("1.1.0", OFFSET)
    lab.index.publish("1.2.0", CLASH, yanked="broken")
    lab.index.publish("1.3.0rc1", CLASH)
    good = lab.ok("canary", "--json", "--out", str(tmp_path / "out"))
    assert good.json["to"]["version"] == "1.1.0" and good.json["clean"]
    assert json.loads((tmp_path / "out/canary.json").read_text()) == good.json
    lab.index.publish("1.3.0", CLASH, wheel=False)
    bad = lab.run("canary", "--out", str(tmp_path / "out"))
    assert bad.code == 3 and "no wheel on the index" in bad.out
    assert "| hook.patch | CONFLICT |" in (tmp_path / "out/canary.md").read_text()
    assert sorted(p.name for p in (lab.root / "pins").iterdir()) == ["1.0.0.toml"]


def test_bisect_names_the_patch(lab: Lab) -> None:
    make(lab)
    probe = [
        "--",
        "python3",
        "-c",
        "import pathlib,sys; sys.exit('chosen = list' in pathlib.Path(sys.argv[1]).read_text())",
    ]
    done = lab.run("bisect", "1.0.0", "--json", *probe, LAYER)
    assert (done.code, done.json["guilty"]) == (1, "layer.patch")
    assert {one["upto"]: one["code"] for one in done.json["tries"]}["hook.patch"] == 0
    overlay = [
        "--",
        "python3",
        "-c",
        "import pathlib,sys; sys.exit(pathlib.Path('vllm/dsa/__init__.py').exists())",
    ]
    assert lab.run("bisect", "1.0.0", "--json", *overlay).json["guilty"] == "the overlay"
    none = lab.run("bisect", "1.0.0", "--", "true")
    assert none.code == 0 and "does not fail" in none.out
    upstream = lab.run("bisect", "1.0.0", "--", "false")
    assert upstream.code == 0 and "upstream itself" in upstream.out
    assert not list((lab.root / ".work/scratch").glob("bisect*"))


@pytest.mark.parametrize("count", [2, 3, 7, 20])
def test_bisect_finds_every_place(count: int) -> None:
    for guilty in range(1, count):
        asked: list[int] = []

        def code(number: int, guilty: int = guilty, asked: list[int] = asked) -> int:
            asked.append(number)
            return int(number >= guilty)

        assert search(count, code) == [guilty]
        assert len(set(asked)) <= 2 + count.bit_length()


def test_bisect_steps_over_what_cannot_be_tried() -> None:
    codes = {0: 0, 1: 0, 2: SKIP, 3: SKIP, 4: 1, 5: 1}
    assert search(6, codes.__getitem__) == [2, 3, 4]
    codes[3] = 0
    assert search(6, codes.__getitem__) == [4]


def test_review_shows_trees_not_patches(lab: Lab) -> None:
    make(lab)
    git = ["git", "-C", str(lab.root), "-c", "user.name=Me", "-c", "user.email=me@example.org"]
    (lab.root / ".gitignore").write_text(".work/\nbuild/\n")
    commit = [*git, "commit", "-q", "-a", "-m"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*commit, "one"], check=True)
    other = changed(IDX, "    best = list(best)\n", "    best = tuple(best)\n", HOOK)
    hook = lab.root / "patches/1.0.0/hook.patch"
    hook.write_bytes(lab.patch(FILES, other, "Hook", SELECT))
    lab.ok("lock", "1.0.0")
    subprocess.run([*commit, "two"], check=True)
    row = lab.ok("review", "HEAD^..HEAD", "--json").json["lines"][0]
    assert (row["line"], row["how"], row["patches"]) == ("1.0.0", "changed", {"hook.patch": "rewritten"})
    changes = [
        line for line in row["diff"].splitlines() if line[:1] in "+-" and line[:3] not in {"+++", "---"}
    ]
    assert changes == ["-    best = list(best)", "+    best = tuple(best)"]

    hook.write_bytes(hook.read_bytes().replace(b"Why it is there.", b"Another reason."))
    lab.ok("lock", "1.0.0")
    subprocess.run([*commit, "three"], check=True)
    text = lab.ok("review", "HEAD^..").out
    assert "hook.patch: same effect" in text and "The patched tree is the same as the tree before." in text

    pin = lab.root / "pins/1.0.0.toml"
    pin.write_text(pin.read_text() + "# a remark\n")
    subprocess.run([*commit, "remark"], check=True)
    assert lab.ok("review", "HEAD^..").out.strip() == "HEAD^..: no line's patches changed"

    lab.index.publish("1.1.0", MERGE)
    lab.ok("rebase", "1.0.0", "--to", "1.1.0", "--accept", "hook.patch")
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*commit, "four"], check=True)
    row = lab.ok("review", "HEAD^..HEAD", "--json").json["lines"][0]
    assert (row["line"], row["how"]) == ("1.1.0", "added") and set(row["patches"].values()) == {"added"}
    assert lab.ok("review", "HEAD..HEAD").out.strip() == "HEAD..HEAD: no line's patches changed"


def test_the_page_holds_the_measured_table() -> None:
    page = (ROOT / table.PAGE).read_text()
    results = json.loads((ROOT / table.RESULTS).read_text())
    assert table.with_table(page, results) == page, "fix: series rebase --table"
    with pytest.raises(CheckFailed, match="marks"):
        table.with_table("no marks", results)
