"""docs/: every page is listed, every feature has one, plots are of the stored results."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import plots  # noqa: E402

from vllm_series import cli, pins  # noqa: E402
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
    there = {path.stem for path in (root / "docs/plots").iterdir()}
    wanted = {plot.name for plot in plots.PLOTS}
    assert wanted <= there <= wanted | {plot.name for plot in plots.offered()}
    stale = [plot.name for plot in plots.stale() if plot.name in there]
    assert stale == [], "scripts/bench.sh --plots makes them"
    text = "".join(page.read_text() for page in pages(root))
    assert [name for name in sorted(there) if f"(plots/{name}.svg)" not in text] == []


MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0}
#: As README has them: `305 ms to 138 ms, 2.21 times (`litetopk/0.33.0-h200.json`)`.
FIGURE = re.compile(r"(\d[\d.]*) (s|ms|us) to (\d[\d.]*) (s|ms|us), (\d[\d.]*) times \(`([\w./-]+\.json)`\)")


def rounds_to(value: float, text: str) -> bool:
    return abs(float(text) - value) <= 0.500001 * 10 ** -len(text.partition(".")[2])


def rows_with(root: Path, figure: re.Match[str]) -> list[str]:
    """The cases of the named file whose times and ratio round to the figure."""
    before, unit, after, unit_after, ratio, name = figure.groups()
    found = []
    for row in json.loads((root / plots.RESULTS / name).read_text())["rows"]:
        scale = MICROSECONDS.get(row.get("unit", ""))
        if scale and rounds_to(row["ratio"], ratio):
            times = (
                row["baseline"] * scale / MICROSECONDS[unit],
                row["ours"] * scale / MICROSECONDS[unit_after],
            )
            if rounds_to(times[0], before) and rounds_to(times[1], after):
                found.append(row["case"])
    return found


def test_figures_of_the_readme_are_stored_rows(root: Path) -> None:
    figures = list(FIGURE.finditer((root / "README.md").read_text()))
    assert len(figures) >= 5, "the form of the figures has changed: change FIGURE too"
    assert [one[0] for one in figures if not rows_with(root, one)] == [], "no stored row has these"
    other = FIGURE.fullmatch(figures[0][0].replace(f" {figures[0][5]} times", " 99 times"))
    assert other and not rows_with(root, other)


def test_results_that_pages_name_are_stored(root: Path) -> None:
    wrong = []
    for page in [*pages(root), root / "README.md", root / "CHANGELOG.md", root / "CONTRIBUTING.md"]:
        for name in re.findall(r"bench/results/([\w.-]+/[\w.-]+\.json)", page.read_text()):
            if not (root / plots.RESULTS / name).is_file():
                wrong.append(f"{page.name}: {name}")
    assert wrong == []


def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    """The indented lines of a page that call the tool, each with the words after `series`."""
    scripts = {"scripts/rebase.sh": ["rebase"], "scripts/apply.sh": ["apply"], "ci/local.sh": ["ci", "run"]}
    found = []
    for line in re.findall(r"^    (\S.*)$", page.read_text(), re.MULTILINE):
        for part in re.split(r"&&|[|;]", line.partition(" #")[0]):
            words = [word for word in part.split() if not re.fullmatch(r"[A-Z_]+=\S*", word)]
            words = words[words[:1] == ["scripts/lib/run.sh"] :]
            if words and words[0] in scripts:
                found.append((line, scripts[words[0]] + words[1:]))
            elif words and words[0] in ("series", ".venv/bin/series"):
                found.append((line, words[1:]))
    return found


def test_commands_on_the_pages_exist(root: Path) -> None:
    """Names of commands and of options; what they do is tested where it is made."""
    with pytest.raises(SystemExit):
        cli.main(["--version"])  # lets each area add its commands
    wrong, seen = [], 0
    for page in [*pages(root), root / "README.md", root / "CONTRIBUTING.md"]:
        for line, words in commands_of(page):
            command: click.Command = cli.cli
            while isinstance(command, click.Group) and words and words[0] in command.commands:
                command = command.commands[words.pop(0)]
            known = {name for one in command.params for name in one.opts + one.secondary_opts} | {"--help"}
            options = [word.partition("=")[0] for word in words if word.startswith("--") and len(word) > 2]
            seen += 1
            if isinstance(command, click.Group) or not set(options) <= known:
                wrong.append(f"{page.name}: {line}")
    assert wrong == [] and seen > 25


def ratio_row(case: str, metric: str, ratio: float) -> dict[str, object]:
    return {"case": case, "metric": metric, "unit": "us", "baseline": ratio, "ours": 1.0, "ratio": ratio}


def test_an_offered_plot_is_drawn_once_there_are_rows(tmp_path: Path) -> None:
    """The cases as the benches write them: bench/e2e_decode.py, litedsa_operator.py and logits_slab.py."""
    assert plots.offered(tmp_path) == []
    decode = "mode={} phase=decode heads=16 index=64 graph=FULL_DECODE_ONLY B={} ctx={}"
    rows = {
        "overlap": [
            ratio_row(decode.format(mode, batch, context), "graph", 1 + batch / 100)
            for mode in ("off", "wk", "full")
            for context in (32768, 4096)
            for batch in (4, 1)
        ],
        "litedsa": [
            ratio_row(f"heads=8 T=16384 u={u} base={base}", "time", u)
            for base in ("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", "card")
            for u in (2.0, 1.5)
        ],
        "deepgemm": [
            {**ratio_row(f"slab S={s} step=8192", "peak_MiB", 2.0), "series_MiB": series}
            for s, series in (
                (16384, {"baseline": [3.0, 5.0], "ours": [1.0, 1.0]}),
                (8192, {"baseline": [4.0], "ours": [1.0]}),
            )
        ],
    }
    for folder, one in rows.items():
        (tmp_path / plots.RESULTS / folder).mkdir(parents=True)
        (tmp_path / plots.RESULTS / folder / "0.33.0-h200.json").write_text(json.dumps({"rows": one}))
    found = {plot.name: plot for plot in plots.offered(tmp_path)}
    assert sorted(found) == ["litedsa-operator", "logits_slab-operator", "overlap-decode"]
    shown = plots.points(found["overlap-decode"], tmp_path)
    names = [f"{mode}, context {context}" for mode in ("full", "wk") for context in (4096, 32768)]
    assert sorted(shown) == sorted(names)
    assert [(x, row["ratio"]) for x, row in shown[names[0]]] == [(1, 1.01), (4, 1.04)]
    assert [x for x, _ in plots.points(found["litedsa-operator"], tmp_path)["8 heads"]] == [1.5, 2.0]
    ((x, row),) = plots.points(found["logits_slab-operator"], tmp_path)["steps of 8192"]
    assert x == 16384 and row["series_MiB"]["baseline"] == [3.0, 5.0]
    for plot in found.values():
        plots.draw(plot, tmp_path / plots.PLOTS_DIR / f"{plot.name}.svg", tmp_path)
    assert {plot.name for plot in plots.OFFERED if plot in plots.stale(tmp_path)} == set()


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


def test_the_command_that_makes_the_plots(root: Path) -> None:
    done = subprocess.run(
        ["bash", "scripts/bench.sh", "--plots", "--check"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "all plots are of the stored results\n"), done.stderr


def test_benchmarks_that_cannot_run_say_so_and_draw_nothing(root: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    command = ["bash", "scripts/bench.sh", "--select", "nothing"]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert "there is no nothing in the GPU suite" in done.stderr


def test_results_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    plot = plots.PLOTS[0]
    path = tmp_path / plots.RESULTS / plot.results
    path.parent.mkdir(parents=True)
    for text in ("", '{"rows": [', "[]", "{}"):
        path.write_text(text)
        with pytest.raises(SystemExit, match=f"{plot.results} cannot be read"):
            plots.points(plot, tmp_path)


def test_a_plot_without_matplotlib_says_where_it_is(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, 'bench'); import plots, pathlib; "
        f"plots.draw(plots.PLOTS[0], pathlib.Path({str(tmp_path)!r}) / 'a.svg')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "fix: scripts/bench.sh --plots" in done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


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
