"""Every state, each made by what upstream really does to files: one patch, one next release, one report."""

from __future__ import annotations

import pytest
from rebase_lab import FILES, INDEXER, LIVE, NEWER, Lab, changed

IDX = "vllm/layers/indexer.py"
LAYER = "vllm/layers/mla.py"
HOOK = changed(IDX, "    best = order[-k:]\n", "    best = order[-k:]\n    best = list(best)\n")
TWO = changed(IDX, "        total += a * b\n", "        total += a * b\n        total += 0\n", HOOK)
SELECT = f"{IDX}::select"


def with_(path: str, old: str, new: str) -> dict[str, str]:
    return changed(path, old, new)


def without(path: str) -> dict[str, str]:
    return {name: text for name, text in FILES.items() if name != path}


CASES: dict[str, tuple[dict[str, str], dict[str, str], str, str]] = {
    # name: (next release, trailers, state, part of what is said about it)
    "clean": (with_("README.md", "upstream", "Upstream"), {}, "CLEAN", ""),
    "offset": (with_(IDX, "import os\n", "import os\nimport sys\n"), {}, "OFFSET", "hunk 1: +1 lines"),
    "merged": (with_(IDX, "    return best\n", "    return best[:]\n"), {}, "MERGED", "around"),
    "upstreamed": (HOOK, {}, "UPSTREAMED", "applies in reverse"),
    "upstreamed-elsewhere-changed": (
        changed(IDX, "    return best\n", "    return best[:]\n", HOOK),
        {}, "UPSTREAMED", "nothing left to change"),
    "upstreamed-and-neighbour-changed": (
        changed(IDX, "    best.reverse()\n", "    best = best[::-1]\n", HOOK),
        {}, "UPSTREAMED", "in other surroundings"),
    "drop-when-version": (dict(FILES), {"drop": "vllm>=1.1"}, "UPSTREAMED", "Drop-When: vllm>=1.1"),
    "drop-when-later": (dict(FILES), {"drop": "vllm>=1.2"}, "CLEAN", ""),
    "drop-when-probe": (
        with_(IDX, "LIMIT = 8\n", "LIMIT = 8\nREADY = 1\n"),
        {"drop": f"symbol:{IDX}::READY"}, "UPSTREAMED", "READY"),
    "unreached": ({**FILES, **NEWER}, {"live": LIVE}, "UNREACHED", "vllm.models.deepseek_v32"),
    "conflict": (
        with_(IDX, "    best = order[-k:]\n", "    best = order[: -k - 1 : -1]\n"), {}, "CONFLICT", IDX),
    "anchor-renamed": (with_(IDX, "def select(", "def choose("), {}, "ANCHOR_LOST", "has no select"),
    "anchor-elsewhere": (
        with_(IDX, "def select(scores, k):\n    \"\"\"The k largest.\"\"\"\n",
              "def select(scores, k):\n    \"\"\"The k largest.\"\"\"\n    return other(scores, k)\n\n\n"
              "def other(scores, k):\n"),
        {}, "ANCHOR_LOST", "lies in other"),
    "gone": (without(IDX), {}, "TARGET_GONE", IDX),
    "renamed": (
        {**without(IDX), "vllm/dsa2/index.py": INDEXER},
        {}, "TARGET_RENAMED", "vllm/dsa2/index.py; there it is CLEAN"),
    "renamed-and-changed": (
        {**without(IDX), "vllm/dsa2/index.py": INDEXER.replace("order[-k:]", "order[len(order) - k:]")},
        {}, "TARGET_RENAMED", "there it is CONFLICT"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_state(lab: Lab, case: str) -> None:
    files, trailers, state, said = CASES[case]
    lab.line("1.0.0", FILES, {"hook.patch": lab.patch(FILES, HOOK, "Hook", SELECT, **trailers)})
    lab.index.publish("1.1.0", files)
    done = lab.run("rebase", "1.0.0", "--to", "1.1.0", "--report", "--json")
    row = done.json["patches"][0]
    assert (row["state"], done.code) == (state, 0 if state in {"CLEAN", "OFFSET", "UPSTREAMED"} else 3), done
    assert said in row["detail"]
    assert not (lab.root / "pins/1.1.0.toml").exists() and not (lab.root / "patches/1.1.0").exists()
    assert not lab.tree("1.1.0").exists()
    target = row["targets"][0]
    assert target["path"] == IDX
    assert target["status"] == {"TARGET_GONE": "gone", "TARGET_RENAMED": "renamed"}.get(
        state, target["status"]
    )


def test_a_lost_hunk_is_named(lab: Lab) -> None:
    """Upstream took one of two hunks: the merge keeps the other and would not say a word."""
    both = (SELECT, f"{IDX}::score")
    lab.line("1.0.0", FILES, {"two.patch": lab.patch(FILES, TWO, "Two", *both)})
    lab.index.publish("1.1.0", HOOK)
    row = lab.run("rebase", "1.0.0", "--to", "1.1.0", "--report", "--json").json["patches"][0]
    assert row["lost"] == [f"{IDX}: +    best = list(best)"] and row["hunks"] == [2, 1]
    assert row["state"] == "ANCHOR_LOST" and "changes nothing there" in row["detail"]


def test_a_lost_line_is_named(lab: Lab) -> None:
    """The same within one function, where no anchor can notice it."""
    two = changed(
        IDX, "    order = sorted(scores)\n", "    scores = list(scores)\n    order = sorted(scores)\n", HOOK
    )
    lab.line("1.0.0", FILES, {"two.patch": lab.patch(FILES, two, "Two", SELECT)})
    lab.index.publish("1.1.0", changed(IDX, "    return best\n", "    return best[:]\n", HOOK))
    row = lab.run("rebase", "1.0.0", "--to", "1.1.0", "--report", "--json").json["patches"][0]
    assert (row["state"], row["lost"]) == ("MERGED", [f"{IDX}: +    best = list(best)"])
    text = lab.run("rebase", "1.0.0", "--to", "1.1.0", "--report").out
    assert "Changes that are lost" in text and "+    best = list(best)" in text


def test_a_patch_that_waits_for_another_says_so(lab: Lab) -> None:
    """The second patch stands on the first one's line; the report names the first, and goes on to the
    third."""
    second = changed(IDX, "    best = list(best)\n", "    best = list(best)\n    best = tuple(best)\n", HOOK)
    third = changed(LAYER, "        return [", "        chosen = list(chosen)\n        return [", second)
    patches = {
        "first.patch": lab.patch(FILES, HOOK, "First", SELECT),
        "second.patch": lab.patch(HOOK, second, "Second", SELECT),
        "third.patch": lab.patch(second, third, "Third", f"{LAYER}::Layer.forward"),
    }
    lab.line("1.0.0", FILES, patches)
    lab.index.publish("1.1.0", CASES["conflict"][0])
    done = lab.run("rebase", "1.0.0", "--to", "1.1.0", "--report", "--json")
    assert done.states() == {"first.patch": "CONFLICT", "second.patch": "CONFLICT", "third.patch": "CLEAN"}
    assert done.json["patches"][1]["notes"] == ["may fail only because first.patch is not applied before it"]


def test_a_conflict_in_dead_code_says_both(lab: Lab) -> None:
    lab.line("1.0.0", FILES, {"hook.patch": lab.patch(FILES, HOOK, "Hook", SELECT, live=LIVE)})
    lab.index.publish("1.1.0", {**CASES["conflict"][0], **NEWER})
    row = lab.run("rebase", "1.0.0", "--to", "1.1.0", "--report", "--json").json["patches"][0]
    assert row["state"] == "CONFLICT" and any("UNREACHED as well" in note for note in row["notes"])


def test_a_proof_of_upstreamed_that_no_longer_holds_needs_a_person(lab: Lab) -> None:
    lab.line("1.0.0", FILES, {"hook.patch": lab.patch(FILES, HOOK, "Hook", SELECT)})
    (lab.root / "patches/1.0.0/upstreamed.toml").write_text(
        '[[upstreamed]]\nid = "limit"\nfeature = "core"\norigin = "none"\nsince = "1.0"\n'
        'proves = "there is a limit"\n'
        f'[[upstreamed.probe]]\nkind = "symbol"\nfile = "{IDX}"\nname = "LIMIT"\n'
    )
    lab.index.publish("1.1.0", changed(IDX, "LIMIT = 8", "BOUND = 8"))
    done = lab.run("rebase", "1.0.0", "--to", "1.1.0", "--report", "--json")
    assert done.code == 3 and done.states() == {"hook.patch": "CLEAN"}
    assert "limit" in done.json["unproven"][0] and not done.json["clean"]
