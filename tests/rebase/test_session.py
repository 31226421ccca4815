"""The interactive rebase: stop, edit, go on, give up, be killed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from rebase_lab import FILES, LIVE, NEWER, Index, Lab, changed, new_lab

IDX = "vllm/layers/indexer.py"
LAYER = "vllm/layers/mla.py"
HOOK = changed(IDX, "    best = order[-k:]\n", "    best = order[-k:]\n    best = list(best)\n")
TWO = changed(LAYER, "        return [", "        chosen = list(chosen)\n        return [", HOOK)
THREE = changed(IDX, "LIMIT = 8\n", "LIMIT = 8\nWIDE = 16\n", TWO)
SELECT, FORWARD, WIDE = f"{IDX}::select", f"{LAYER}::Layer.forward", f"{IDX}::"
CLASH = changed(IDX, "    best = order[-k:]\n", "    best = order[len(order) - k :]\n")
OFFSET = changed(IDX, "import os\n", "import os\nimport sys\n")
MERGE = changed(IDX, "    return best\n", "    return best[:]\n")


def make(lab: Lab, **more: str) -> Lab:
    """A line with three patches: two hooks and a name at the end of the module."""
    patches = {
        "hook.patch": lab.patch(FILES, HOOK, "Hook", SELECT, **more),
        "layer.patch": lab.patch(HOOK, TWO, "Layer", FORWARD, live=LIVE),
        "wide.patch": lab.patch(TWO, THREE, "Wide", WIDE),
    }
    lab.line("1.0.0", FILES, patches)
    return lab


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, text
    path.write_text(text.replace(old, new))


def test_without_a_person_the_new_line_is_complete(lab: Lab) -> None:
    make(lab).index.publish("1.1.0", OFFSET)
    before = lab.snapshot("1.0.0")
    done = lab.ok("rebase", "1.0.0", "--to", "1.1.0", "--json")
    assert done.states() == {"hook.patch": "OFFSET", "layer.patch": "CLEAN", "wide.patch": "OFFSET"}
    assert lab.snapshot("1.0.0") == before
    assert {row["name"] for row in lab.ok("verify", "1.1.0", "--json").json["lines"]["1.1.0"]} >= {
        "lock",
        "apply",
    }
    assert lab.ok("apply", "1.1.0").code == 0
    assert (lab.root / "build/1.1.0" / IDX).read_text() == changed(
        IDX, "import os\n", "import os\nimport sys\n", THREE
    )[IDX]
    assert "# about wide.patch\nwide.patch\n" in (lab.root / "patches/1.1.0/series").read_text()
    old, new = lab.parsed("1.0.0", "hook.patch"), lab.parsed("1.1.0", "hook.patch")
    assert (old.subject, old.body, old.author) == (new.subject, new.body, new.author) and old.data != new.data
    again = lab.run("rebase", "1.0.0", "--to", "1.1.0")
    assert again.code == 2 and "has patches of its own" in again.err
    assert not lab.tree("1.1.0").exists() and not list((lab.root / ".work/rebase").glob("*.message"))
    report = json.loads((lab.root / ".work/rebase/1.1.0-report.json").read_text())
    assert report["clean"] and [row["decision"] for row in report["patches"]] == ["adopted"] * 3


def test_a_conflict_is_shown_edited_and_continued(lab: Lab) -> None:
    make(lab).index.publish("1.1.0", CLASH)
    stop = lab.run("rebase", "1.0.0", "--to", "1.1.0")
    file = lab.tree("1.1.0") / IDX
    assert stop.code == 3 and "hook.patch: CONFLICT" in stop.err
    assert "series rebase --continue --to 1.1.0" in stop.err and "build/1.1.0.rebase" in stop.err
    assert "<<<<<<<" in file.read_text() and not (lab.root / "patches/1.1.0").exists()

    for _ in range(2):  # refused as long as a marker stays, and nothing is touched
        before = file.read_bytes()
        again = lab.run("rebase", "--continue")
        assert again.code == 3 and "conflict markers" in again.err and file.read_bytes() == before

    edit(file, file.read_text(), changed(IDX, "    best = order[len(order) - k :]\n",
         "    best = order[len(order) - k :]\n    best = list(best)\n", CLASH)[IDX])  # fmt: skip
    done = lab.ok("rebase", "--continue", "--json")
    rows = {row["patch"]: (row["state"], row["decision"]) for row in done.json["patches"]}
    assert rows["hook.patch"] == ("CONFLICT", "resolved") and rows["wide.patch"][1] == "adopted"
    assert done.json["patches"][0]["lost"] == [] == done.json["patches"][0]["gained"]
    lab.ok("verify", "1.1.0")
    assert lab.parsed("1.1.0", "hook.patch").get("Anchor") == [SELECT]


def test_git_add_and_commit_by_hand_are_taken_too(lab: Lab) -> None:
    """People resolve as they are used to: with their own git, their own identity, a commit of their own."""
    make(lab).index.publish("1.1.0", CLASH)
    lab.run("rebase", "1.0.0", "--to", "1.1.0")
    tree = lab.tree("1.1.0")
    (tree / IDX).write_text(changed(IDX, "    best = order[len(order) - k :]\n",
                                    "    best = list(order[len(order) - k :])\n", CLASH)[IDX])  # fmt: skip
    git = ["git", "-C", str(tree), "-c", "user.name=Me", "-c", "user.email=me@example.org"]
    message = "Hook anew\n\nWhy.\n\nFeature: core\nAnchor: " + SELECT + "\n"
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", message], check=True)
    row = lab.ok("rebase", "--continue", "--json").json["patches"][0]
    assert row["lost"] == [f"{IDX}: +    best = list(best)"]
    patch = lab.parsed("1.1.0", "hook.patch")
    assert (
        patch.subject == "Hook anew" and "series@example.invalid" in patch.author and "Me" not in patch.author
    )


def test_merged_waits_for_accept(lab: Lab) -> None:
    make(lab).index.publish("1.1.0", MERGE)
    stop = lab.run("rebase", "1.0.0", "--to", "1.1.0")
    assert stop.code == 3 and "MERGED" in stop.err and "--accept hook.patch" in stop.err
    assert "best = list(best)" in (lab.tree("1.1.0") / IDX).read_text()
    again = lab.run("rebase", "--continue")
    assert again.code == 3 and "nobody said yes" in again.err
    assert lab.run("rebase", "--continue", "--accept", "hok.patch").code == 2
    done = lab.ok("rebase", "--continue", "--accept", "hook.patch", "--json")
    assert done.json["patches"][0]["decision"] == "accepted"
    lab.ok("verify", "1.1.0")


def test_unreached_is_accepted_or_dropped(lab: Lab, tmp_path: Path, index: Index) -> None:
    make(lab).index.publish("1.1.0", {**FILES, **NEWER})
    stop = lab.run("rebase", "1.0.0", "--to", "1.1.0")
    assert stop.code == 3 and "layer.patch: UNREACHED" in stop.err and "--drop layer.patch" in stop.err
    lab.ok("rebase", "--continue", "--drop", "layer.patch")
    assert sorted(p.name for p in (lab.root / "patches/1.1.0").glob("*.patch")) == [
        "hook.patch",
        "wide.patch",
    ]
    assert "layer.patch" not in (lab.root / "patches/1.1.0/series").read_text()
    index.publish("1.2.0", {**FILES, **NEWER})
    done = lab.ok("rebase", "1.0.0", "--to", "1.2.0", "--accept", "layer.patch", "--json")
    assert done.states()["layer.patch"] == "UNREACHED" and (lab.root / "patches/1.2.0/layer.patch").exists()


def test_upstreamed_is_recorded_with_a_proof(lab: Lab) -> None:
    make(lab).index.publish("1.1.0", HOOK)
    done = lab.ok("rebase", "1.0.0", "--to", "1.1.0", "--json")
    assert done.json["patches"][0]["decision"] == "recorded in upstreamed.toml"
    text = (lab.root / "patches/1.1.0/upstreamed.toml").read_text()
    assert 'id = "hook"' in text and 'since = "1.1.0"' in text and "list" in text
    assert "\nhook.patch\n" not in (lab.root / "patches/1.1.0/series").read_text()
    lab.ok("verify", "1.1.0")
    shutil.copy(lab.root / "patches/1.1.0/upstreamed.toml", lab.root / "patches/1.0.0/upstreamed.toml")
    assert lab.run("verify", "1.0.0").code != 0  # the proof does not hold where the patch is still needed


def test_a_moved_file_takes_its_anchors_along(lab: Lab) -> None:
    moved = {("vllm/dsa2/index.py" if path == IDX else path): text for path, text in FILES.items()}
    make(lab).index.publish("1.1.0", moved)
    stop = lab.run("rebase", "1.0.0", "--to", "1.1.0")
    assert stop.code == 3 and "TARGET_RENAMED" in stop.err and "vllm/dsa2/index.py" in stop.err
    lab.ok("rebase", "--continue", "--accept", "hook.patch", "--accept", "wide.patch")
    patch = lab.parsed("1.1.0", "hook.patch")
    assert patch.get("Anchor") == ["vllm/dsa2/index.py::select"] and patch.paths == ["vllm/dsa2/index.py"]
    lab.ok("verify", "1.1.0")


def test_a_gone_file_is_replaced_by_hand(lab: Lab) -> None:
    new = {path: text for path, text in FILES.items() if path != IDX}
    new |= {"vllm/other.py": "def pick(scores, k):\n    return scores[:k]\n"}
    make(lab).index.publish("1.1.0", new)
    stop = lab.run("rebase", "1.0.0", "--to", "1.1.0")
    assert stop.code == 3 and "TARGET_GONE" in stop.err and "correct Anchor" in stop.err
    unchanged = lab.run("rebase", "--continue")
    assert unchanged.code == 3 and "nothing was changed" in unchanged.err
    edit(lab.tree("1.1.0") / "vllm/other.py", "    return scores[:k]\n", "    return list(scores[:k])\n")
    refused = lab.run("rebase", "--continue")
    assert refused.code == 1 and "no Anchor names it" in refused.err and "1.1.0.message" in refused.err
    edit(lab.root / ".work/rebase/1.1.0.message", SELECT, "vllm/other.py::pick")
    stop = lab.run("rebase", "--continue", "--drop", "wide.patch")
    assert stop.code == 0, stop
    assert lab.parsed("1.1.0", "hook.patch").get("Anchor") == ["vllm/other.py::pick"]
    lab.ok("verify", "1.1.0")


def test_a_change_in_the_wrong_function_is_refused(lab: Lab) -> None:
    """The text fits another function strictly; the anchor refuses it, and an edit there as well."""
    head = 'def select(scores, k):\n    """The k largest."""\n'
    new = changed(IDX, head, head + "    return other(scores, k)\n\n\ndef other(scores, k):\n")
    make(lab).index.publish("1.1.0", new)
    stop = lab.run("rebase", "1.0.0", "--to", "1.1.0", "--drop", "wide.patch")
    assert stop.code == 3 and "ANCHOR_LOST" in stop.err and "lies in other" in stop.err
    assert "list(best)" not in (lab.tree("1.1.0") / IDX).read_text()
    edit(lab.tree("1.1.0") / IDX, "    best = order[-k:]\n", "    best = order[-k:]\n    best = list(best)\n")
    refused = lab.run("rebase", "--continue")
    assert refused.code == 1 and "lies in other" in refused.err
    (lab.tree("1.1.0") / IDX).write_text(
        new[IDX].replace("    return other(scores, k)\n", "    return list(other(scores, k))\n")
    )
    lab.ok("rebase", "--continue")
    lab.ok("verify", "1.1.0")


def test_stray_files_are_not_taken_into_a_patch(lab: Lab) -> None:
    make(lab).index.publish("1.1.0", CLASH)
    lab.run("rebase", "1.0.0", "--to", "1.1.0")
    (lab.tree("1.1.0") / IDX).write_text(
        CLASH[IDX].replace("    best.reverse()", "    best = list(best)\n    best.reverse()")
    )
    (lab.tree("1.1.0") / "notes.txt").write_text("mine\n")
    stop = lab.run("rebase", "--continue")
    assert stop.code == 3 and "notes.txt" in stop.err and (lab.tree("1.1.0") / "notes.txt").exists()
    (lab.tree("1.1.0") / "notes.txt").unlink()
    lab.ok("rebase", "--continue")


def test_abort_keeps_the_edits(lab: Lab) -> None:
    make(lab).index.publish("1.1.0", CLASH)
    lab.run("rebase", "1.0.0", "--to", "1.1.0")
    (lab.tree("1.1.0") / IDX).write_text("my work\n")
    done = lab.ok("rebase", "--abort", "--json")
    kept = done.json["kept"]
    shown = subprocess.run(
        ["git", "-C", str(lab.root / ".work/odb.git"), "show", f"{kept}:{IDX}"],
        capture_output=True,
        text=True,
    )
    assert shown.stdout == "my work\n"
    assert not lab.tree("1.1.0").exists() and not (lab.root / "patches/1.1.0").exists()
    assert lab.run("rebase", "1.0.0", "--to", "1.1.0").code == 3  # can begin anew


def test_the_same_decisions_give_the_same_bytes(tmp_path: Path, index: Index) -> None:
    """Stopped and continued, or with all decisions given at the start: the new line is the same."""
    found = []
    for number, steps in enumerate([
        [["rebase", "1.0.0", "--to", "1.1.0", "--accept", "hook.patch", "--drop", "layer.patch"]],
        [["rebase", "1.0.0", "--to", "1.1.0"], ["rebase", "--continue", "--accept", "hook.patch"],
         ["rebase", "--continue", "--drop", "layer.patch"]],
    ]):  # fmt: skip
        lab = make(new_lab(tmp_path / str(number), index))
        index.publish("1.1.0", {**MERGE, **NEWER})
        codes = [lab.run(*step).code for step in steps]
        assert codes[-1] == 0, codes
        found.append(lab.snapshot("1.1.0"))
    assert found[0] == found[1] and len(found[0]) == 5


ACCEPT = ("rebase", "1.0.0", "--to", "1.1.0", "--accept", "hook.patch")


def _state(root: Path) -> dict[str, object]:
    path = root / ".work/rebase/1.1.0.json"
    return json.loads(path.read_text()) if path.exists() else {}


MOMENTS = {
    "the state is there": lambda root: bool(_state(root)),
    "the tree is there": lambda root: (root / "build/1.1.0.rebase/.git").exists(),
    "one patch is settled": lambda root: bool(_state(root).get("outcomes")),
    "all are settled": lambda root: _state(root).get("phase") == "writing",
    "the pin is written": lambda root: (root / "pins/1.1.0.toml").exists(),
    "the last patch is written": lambda root: (root / "patches/1.1.0/wide.patch").exists(),
}


QUICK = "one patch is settled"


@pytest.mark.parametrize(
    "moment", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MOMENTS]
)
def test_a_kill_loses_nothing(lab: Lab, tmp_path: Path, index: Index, moment: str) -> None:
    """kill -9 once something has happened, then --continue: the same line as without a kill."""
    other = make(new_lab(tmp_path / "reference", index))
    index.publish("1.1.0", MERGE)
    other.ok(*ACCEPT)
    make(lab)
    child = subprocess.Popen(
        lab.argv(*ACCEPT), cwd=lab.root, env=lab.env, stderr=subprocess.PIPE, start_new_session=True
    )
    while child.poll() is None and not MOMENTS[moment](lab.root):
        time.sleep(0.002)
    child.kill()
    child.communicate()
    if _state(lab.root):
        assert child.returncode == -signal.SIGKILL
        lab.ok("rebase", "--continue")
    assert lab.snapshot("1.1.0") == other.snapshot("1.1.0")
    lab.ok("verify", "1.1.0")
    assert not lab.tree("1.1.0").exists() and not _state(lab.root)


def test_a_kill_between_edit_and_state_keeps_the_edit(lab: Lab) -> None:
    """The edit is in the tree until the state says that it is a commit: killed there, it is read again."""
    make(lab).index.publish("1.1.0", CLASH)
    lab.run("rebase", "1.0.0", "--to", "1.1.0")
    state = lab.root / ".work/rebase/1.1.0.json"
    stopped = state.read_bytes()
    (lab.tree("1.1.0") / IDX).write_text(
        CLASH[IDX].replace("    best.reverse()", "    best = list(best)\n    best.reverse()")
    )
    child = subprocess.Popen(
        lab.argv("rebase", "--continue"), cwd=lab.root, env=lab.env, stderr=subprocess.PIPE
    )
    while child.poll() is None and state.exists() and state.read_bytes() == stopped:
        time.sleep(0.005)
    child.kill()
    child.communicate()
    if state.exists():
        lab.ok("rebase", "--continue")
    assert b"+    best = list(best)" in (lab.root / "patches/1.1.0/hook.patch").read_bytes()
    lab.ok("verify", "1.1.0")
