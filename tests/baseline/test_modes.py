"""Modes: which there are follows from the registry of the patched tree alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_series import apply, pins
from vllm_series.baseline.modes import expand, features, resolve
from vllm_series.errors import UsageError
from vllm_series.importer import odb
from vllm_series.runtime import make_site
from vllm_series.workspace import Workspace

ROOT = Path(__file__).parents[2]


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """A patched tree whose registry knows three features and ships two."""
    rows = (
        'Feature("overlap", "title", ("VLLM_OVERLAP", "VLLM_NO"))',
        'Feature("topk", "t", ("VLLM_TOPK",))',
        'Feature("later", "t", ("VLLM_LATER",))',
    )
    own = 'MAIN = "VLLM_OVERLAP"\nFEATURE = Feature("overlap", "t", switches=(MAIN, "VLLM_NO"), probe=p)\n'
    envs = (
        'VLLM_OVERLAP: Literal["auto", "off", "wk", "full"] = "auto"',
        "VLLM_TOPK: bool = False",
        'VLLM_LATER: Literal["auto", "off"] = "auto"',
    )
    for name, text in {
        "dsa/features.py": f"KNOWN = ({', '.join(rows)})\n",
        "dsa/overlap/feature.py": own,
        "dsa/topk/feature.py": 'from .switch import MAIN\nFEATURE = Feature("topk", "t", (MAIN,))\n',
        "dsa/later/__init__.py": "",
        "envs.py": "if TYPE_CHECKING:\n    " + "\n    ".join(envs) + "\n",
    }.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    return tmp_path


def test_modes_come_from_the_registry(registry: Path) -> None:
    assert resolve("off", registry).env == {"VLLM_DSA": "0"} and resolve("off", registry).exact
    off = {"VLLM_OVERLAP": "off", "VLLM_TOPK": "0", "VLLM_LATER": "off"}
    assert resolve("feature:topk", registry).env == {**off, "VLLM_TOPK": "1"}
    assert resolve("feature:overlap=full", registry).env == {**off, "VLLM_OVERLAP": "full"}
    assert resolve("feature:overlap", registry).env == {
        **off,
        "VLLM_OVERLAP": "wk",
    }  # auto may decide for off
    assert resolve("feature:later", registry).env == {**off, "VLLM_LATER": "auto"}
    assert not resolve("upstream", registry).patched
    for wrong in ("onn", "feature:none", "feature:overlap=wild", "feature:topk=2"):
        with pytest.raises(UsageError):
            resolve(wrong, registry)


def test_features_is_one_mode_for_each_value_of_what_is_shipped(registry: Path) -> None:
    every = ["feature:overlap=wk", "feature:overlap=full", "feature:topk"]
    assert expand(["features"], registry) == every
    assert expand(["upstream", "off", "on", "features"], registry) == ["off", "on", *every]
    assert expand(["topk", "overlap=auto", "feature:topk"], registry) == [
        "feature:topk",
        "feature:overlap=auto",
    ]
    assert expand(["later"], registry) == ["feature:later"]  # by name also what is not shipped
    assert expand(["onn"], registry) == ["onn"]  # refused when it is resolved
    assert all(resolve(name, registry).patched for name in every)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["0.33.0", "0.28.0"])
def test_each_shipped_feature_has_a_mode_on_the_real_tree(line: str) -> None:
    ws = Workspace(ROOT)
    tree = make_site(ws, line, odb(ws), apply.ensure(ws, pins.load_pin(ws, line)).head).path
    folders = {path.parent.name for path in (ROOT / "overlay/vllm/dsa").glob("*/feature.py")}
    modes = expand(["features"], tree)
    assert {name.removeprefix("feature:").partition("=")[0] for name in modes} == folders
    switches = set(features(tree).values())
    for name in modes:
        env = resolve(name, tree).env
        assert env.keys() == switches
        assert sum(value not in ("0", "off") for value in env.values()) == 1, name
