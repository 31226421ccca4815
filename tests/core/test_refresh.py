"""`series ci refresh`: what an export would change in the patches, as one diff."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from core_lab import Project


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests run on Buildkite's agents as well, where the printed command is another."""
    monkeypatch.delenv("BUILDKITE", raising=False)


def take(project: Project) -> None:
    """Apply the refreshed patches with the command that the tool prints."""
    done = project.series("ci", "refresh", project.line, "--json").json
    assert done["command"] == f"git apply build/refresh/{project.line}.patch"
    subprocess.run(done["command"].split(), cwd=project.root, check=True)


def names(project: Project) -> list[str]:
    rows = (project.patches / "series").read_text().splitlines()
    return [row for row in rows if row.endswith(".patch")]


def files(project: Project) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in project.patches.iterdir()}


def test_nothing_to_refresh(two: Project) -> None:
    before = files(two)
    assert two.series("ci", "refresh", two.line, "--json").json["file"] is None
    assert files(two) == before


def test_a_message_changed_by_hand_needs_a_new_lock(two: Project) -> None:
    first = two.patches / names(two)[0]
    first.write_bytes(first.read_bytes().replace(b"Because the test says so.", b"Because of something else."))
    two.series("verify", code=1)
    take(two)
    two.series("verify")
    assert b"Because of something else." in first.read_bytes()


def test_a_later_patch_whose_context_moved_is_merged(two: Project) -> None:
    """The second patch names, as context, a line that the first one adds and that changes there."""
    one, other = (two.patches / name for name in names(two))
    commit = two.git("rev-parse", f":/{subject(other)}").strip()
    options = ("--full-index", "--zero-commit", "--no-signature", "-U9", "-1")
    two.git("format-patch", *options, f"--output={other}", commit)
    wide = other.read_text()
    added = next(row for row in one.read_text().splitlines() if row.startswith("+ "))
    assert added[1:] in wide, "the wide context must hold the first patch's line"
    one.write_text(one.read_text().replace(added, added + "  # changed by hand"))
    assert "does not apply" in two.series("verify", code=1).out
    take(two)
    two.series("verify")
    assert added + "  # changed by hand" in one.read_text()
    assert "  # changed by hand" not in "".join(
        row for row in other.read_text().splitlines() if row.startswith("+")
    )


def test_a_conflict_needs_a_person_and_changes_nothing(two: Project) -> None:
    other = two.patches / names(two)[1]
    text = other.read_text()
    removed = next(row for row in text.splitlines() if row.startswith("-  "))
    other.write_text(text.replace(removed, removed + "  # never was there"))
    before = files(two)
    said = two.series("ci", "refresh", two.line, code=1).err
    assert f"{other.name} does not merge by itself" in said and "series apply" in said
    assert files(two) == before
    assert not (two.root / "build/refresh" / f"{two.line}.patch").exists()


def subject(path: Path) -> str:
    row = next(row for row in path.read_text().splitlines() if row.startswith("Subject: "))
    return row.removeprefix("Subject: ").removeprefix("[PATCH] ")


def test_on_an_agent_the_command_fetches_the_artifact(two: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the job the command has to name the build; where there is no agent, another one helps."""
    monkeypatch.setenv("BUILDKITE", "true")
    monkeypatch.setenv("BUILDKITE_BUILD_ID", "0a-1")
    first = two.patches / names(two)[0]
    first.write_bytes(first.read_bytes().replace(b"Because the test says so.", b"Because of something else."))
    said = two.series("ci", "refresh", two.line).out
    name = f"build/refresh/{two.line}.patch"
    fetch, apply = f"buildkite-agent artifact download {name} . --build 0a-1", f"git apply {name}"
    assert f"  {fetch} && {apply}\n" in said
    assert f"  scripts/lib/run.sh series ci refresh {two.line} && {apply}\n" in said
