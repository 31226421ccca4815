"""`series ci refresh`: what an export would change in the patches, as one diff."""

from __future__ import annotations

import subprocess
from pathlib import Path

from core_lab import Project


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
