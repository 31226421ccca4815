"""docs/features.md says what the patches say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LINES = ("0.28.0", "0.33.0")


def documented(root: Path) -> dict[str, tuple[list[str], str, bool]]:
    """Rows of the switch table: name -> (values, default, in the cache key)."""
    text = (root / "docs" / "features.md").read_text(encoding="utf-8").split("## Switches", 1)[1]
    rows = re.findall(r"^\| `(VLLM_\w+)` \| (.+?) \| `(\w+)` \| (yes|no) \|", text, re.MULTILINE)
    return {
        name: (re.findall(r"`(\w+)`", values), default, key == "yes") for name, values, default, key in rows
    }


def added(root: Path, line: str) -> str:
    patch = (root / "patches" / line / "envs.patch").read_text(encoding="utf-8")
    return "\n".join(
        row[1:] for row in patch.splitlines() if row.startswith("+") and not row.startswith("+++")
    )


@pytest.mark.parametrize("line", LINES)
def test_every_switch_of_the_patch_is_documented(root: Path, line: str) -> None:
    stubs = dict(re.findall(r"^    (VLLM_\w+): .* = (.+)$", added(root, line), re.MULTILINE))
    assert set(stubs) == set(documented(root))
    for name, (values, default, _) in documented(root).items():
        if not values:
            assert stubs[name] == default and default.isdigit()
        elif values == ["0", "1"]:
            assert stubs[name] == ("True" if default == "1" else "False")
        else:
            assert stubs[name] == f'"{default}"'
            assert default in values


@pytest.mark.parametrize("line", LINES)
def test_documented_choices_are_those_that_are_checked(root: Path, line: str) -> None:
    code = re.sub(r"\s+", " ", added(root, line))
    for name, (values, default, _) in documented(root).items():
        if not values:  # a number
            assert f'int(os.getenv("{name}", "{default}"))' in code, name
            continue
        choices = ", ".join(f'"{value}"' for value in values)
        assert f'"{name}", "{default}", [{choices}]' in code, name


def test_both_lines_register_the_same_text(root: Path) -> None:
    assert added(root, "0.28.0") == added(root, "0.33.0")
