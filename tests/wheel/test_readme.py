"""The README says what is so: its figures are in bench/results, its links and commands exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "README.md").read_text()


def test_links_lead_somewhere(text: str, root: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r"\bdocs/[\w-]+\.md", text)
    assert links
    assert [link for link in links if "://" not in link and not (root / link).exists()] == []


def test_scripts_that_it_names_exist(text: str, root: Path) -> None:
    names = set(re.findall(r"\bscripts/[\w-]+\.sh", text))
    assert {"scripts/build.sh", "scripts/test.sh"} <= names
    assert [name for name in names if not (root / name).is_file()] == []


def test_lines_and_torch_are_those_of_the_pins(text: str, root: Path) -> None:
    import tomllib

    for path in (root / "pins").glob("*.toml"):
        pin = tomllib.loads(path.read_text())
        assert re.search(rf"^\| `{pin['line']}` .*\| {pin['torch']['version']} \|", text, re.MULTILINE), (
            path.name
        )


def shown(value: float, like: str) -> bool:
    """Whether ``like`` is ``value`` rounded to as many decimals as it has."""
    return f"{value:.{len(like.partition('.')[2])}f}" == like


def test_gains_are_measured_ones(text: str, root: Path) -> None:
    """`FROM unit to TO unit, X times (file.json)` must be a row of that file."""
    rows = [row for row in text.splitlines() if row.startswith("|") and ".json`)" in row]
    number = r"(\d+(?:\.\d+)?)"
    pattern = rf"{number} (\w+) to {number} \2, {number} times \(`([\w./-]+\.json)`\)"
    gains = [found for row in rows for found in re.findall(pattern, row)]
    assert len(gains) == sum(row.count(".json`)") for row in rows), "a figure is written in another way"
    for before, unit, after, ratio, name in gains:
        measured = json.loads((root / "bench/results" / name).read_text())["rows"]
        assert any(
            row["unit"] == unit
            and shown(row["baseline"], before)
            and shown(row["ours"], after)
            and shown(row["ratio"], ratio)
            for row in measured
        ), f"{name} has no row with {before}, {after} {unit}, {ratio}"


def test_speed_is_the_measured_one(text: str, root: Path) -> None:
    rows = json.loads((root / "bench/results/tool/speed.json").read_text())["rows"]
    medians = {f"{row['median']:.1f} s" for row in rows}
    section = text.partition("## Speed")[2].partition("\n## ")[0]
    stated = re.findall(r"\d+\.\d s", section)
    assert len(stated) == len(rows) and set(stated) <= medians


def test_what_is_not_in_the_release_claims_no_gain(text: str) -> None:
    rows = [row.split("|") for row in text.splitlines() if "| not in this release |" in row]
    assert all(cells[4].strip() == "" for cells in rows)
