"""Reading pins."""

from __future__ import annotations

import pytest
from core_lab import Project

from vllm_series.errors import CheckFailed, UsageError
from vllm_series.pins import lines, load_pin, wheel_of
from vllm_series.workspace import Workspace


def test_unknown_line_lists_the_lines(bare: Project) -> None:
    with pytest.raises(UsageError, match=r"unknown line '0\.1'; the lines are: 0\.9\.0"):
        load_pin(bare.ws, "0.1")
    with pytest.raises(UsageError):
        load_pin(bare.ws, "../pins/0.9.0")
    assert bare.series("apply", "0.1", code=2).err.startswith("error: unknown line")


def test_lines_are_ordered_by_version(bare: Project) -> None:
    for name in ("0.10.0", "0.2.0"):
        (bare.root / f"pins/{name}.toml").write_text("")
    assert lines(bare.ws) == ["0.10.0", "0.9.0", "0.2.0"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 2", "schema is 2"),
        ('line = "0.9.0"', 'line = "0.8.0"', "the file is called"),
        ('commit = "a1b2c3d4e"', 'commit = "v0.9.0"', "source.commit is 'v0.9.0'"),
        ("size = ", "size = -", "source.sdist.size must be a whole number"),
        ('role = "current"', 'role = "best"', "role is 'best'"),
        ("[torch]", "[[torch]]", "torch must be a table"),
        ("schema = 1", "schema = ", "not valid TOML"),
    ],
)
def test_each_wrong_field_is_named(bare: Project, old: str, new: str, message: str) -> None:
    path = bare.root / "pins/0.9.0.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(CheckFailed, match=message):
        load_pin(bare.ws, "0.9.0")


def test_wheel_of_a_platform_that_is_not_pinned(bare: Project) -> None:
    with pytest.raises(UsageError, match="has no riscv64 wheel"):
        wheel_of(bare.pin(), "riscv64")


def test_the_pins_of_this_repository_are_valid(checkout: object) -> None:
    ws = Workspace(checkout)  # type: ignore[arg-type]
    assert lines(ws)[:2] == ["0.33.0", "0.28.0"]
    for line in lines(ws):
        pin = load_pin(ws, line)
        assert len(pin.source.tree) == 40
        assert {"x86_64", "aarch64"} == set(pin.wheels)
        assert pin.wheel_version == f"{line}+dsa.{pin.dsa}"
