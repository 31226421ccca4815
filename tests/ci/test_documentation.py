"""docs/: every page is listed, every feature has one, plots are of the stored results."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import plots  # noqa: E402

from vllm_series import pins  # noqa: E402
from vllm_series.workspace import Workspace  # noqa: E402


def pages(root: Path) -> list[Path]:
    return sorted(path for path in (root / "docs").glob("*.md") if path.name != "README.md")


def test_every_page_is_listed_once(root: Path) -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (root / "docs/README.md").read_text())
    assert sorted(listed) == [path.name for path in pages(root)]


def test_links_between_pages_lead_somewhere(root: Path) -> None:
    wrong = []
    for page in [*pages(root), root / "docs/README.md", root / "CONTRIBUTING.md", root / "CHANGELOG.md"]:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link and not (page.parent / link).exists():
                wrong.append(f"{page.name}: {link}")
    assert wrong == []


def test_each_feature_that_ships_has_a_page_that_names_its_switch(root: Path) -> None:
    section = (root / "docs/README.md").read_text().partition("Features, one page each")[2]
    texts = [(root / "docs" / name).read_text() for name in re.findall(r"\]\(([\w-]+\.md)\)", section)]
    shipped = [path.parent for path in (root / "overlay/vllm/dsa").glob("*/feature.py")]
    assert shipped and texts
    for folder in shipped:
        code = "".join(path.read_text() for path in folder.glob("*.py"))
        switches = set(re.findall(r"\bVLLM_[A-Z_]+", code)) - {"VLLM_DSA"}
        assert any(switch in text for text in texts for switch in switches), folder.name


def test_plots_are_of_the_stored_results_and_shown(root: Path) -> None:
    assert [plot.name for plot in plots.stale()] == [], "scripts/bench.sh --plots makes them"
    text = "".join(page.read_text() for page in pages(root))
    assert [plot.name for plot in plots.PLOTS if f"(plots/{plot.name}.svg)" not in text] == []
    assert {path.stem for path in (root / "docs/plots").iterdir()} == {plot.name for plot in plots.PLOTS}


def test_a_plot_is_drawn_from_the_rows_alone(tmp_path: Path, root: Path) -> None:
    """Drawn twice: the same bytes. A changed row: another digest, and the stored plot counts as stale."""
    plot = dataclasses.replace(plots.PLOTS[0], results="x/one.json")
    data = json.loads((root / plots.RESULTS / plots.PLOTS[0].results).read_text())
    place = tmp_path / plots.RESULTS / "x"
    place.mkdir(parents=True)
    (place / "one.json").write_text(json.dumps(data))
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    plots.draw(plot, one, tmp_path)
    plots.draw(plot, two, tmp_path)
    assert one.read_bytes() == two.read_bytes()
    assert f"rows {plots.digest(plot, tmp_path)}" in one.read_text()
    before = plots.digest(plot, tmp_path)
    next(row for row in data["rows"] if re.fullmatch(plot.select, row["case"]))["ours"] *= 2
    (place / "one.json").write_text(json.dumps(data))
    assert plots.digest(plot, tmp_path) != before


def test_the_newest_row_of_a_case_counts(tmp_path: Path) -> None:
    plot = plots.Plot("p", "x.json", "t", r"n=(?P<x>\d+) (?P<group>\w+)", "{group}", "n")
    row = {"metric": "time", "unit": "us", "baseline": 2.0, "ratio": 2.0}
    rows = [{**row, "case": f"n={n} a", "ours": ours} for n, ours in ((2, 1.0), (1, 1.0), (2, 0.5))]
    (tmp_path / plots.RESULTS).mkdir(parents=True)
    (tmp_path / plots.RESULTS / "x.json").write_text(json.dumps({"rows": rows}))
    assert [(x, one["ours"]) for x, one in plots.points(plot, tmp_path)["a"]] == [(1, 1.0), (2, 0.5)]
    with pytest.raises(SystemExit, match="no row"):
        plots.points(dataclasses.replace(plot, metric="bytes"), tmp_path)


def test_versions_that_operations_names_are_those_of_the_pins(root: Path) -> None:
    ws = Workspace(root)
    text = (root / "docs/operations.md").read_text()
    container = (root / "ci/Containerfile").read_text()
    for line in pins.lines(ws):
        pin = pins.load_pin(ws, line)
        assert f"| `{pin.wheel_version}` | vLLM {pin.version} | {pin.torch} |" in text
        if pin.role == "current":
            assert f"ARG VERSION={pin.version}\n" in container and f"ARG DSA={pin.dsa}\n" in container
