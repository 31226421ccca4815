"""Lint rules."""

from __future__ import annotations

import pytest
from core_lab import Project

from vllm_series.lint import lint

NAME = "change-forward.patch"


def _with(project: Project, old: bytes, new: bytes) -> list[str]:
    path = project.patches / NAME
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    return [str(row) for row in lint(project.ws, "0.9.0")]


def test_a_good_line_has_no_problems(patched: Project) -> None:
    assert lint(patched.ws, "0.9.0") == []
    assert "no problems" in patched.series("lint").out


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"Feature: core\n", b"", "the trailer Feature is missing"),
        (b"Live-When: always\n", b"", "the trailer Live-When is missing"),
        (b"Feature: core", b"Feature: Core Things", "Feature: 'Core Things' is not"),
        (b"Feature: core", b"Feature: core\nFeature: other", "Feature is there 2 times"),
        (b"Origin: none [written for a test]", b"Origin: PR 5", "Origin: 'PR 5' is not"),
        (b"Inappropriate [test]", b"Inappropriate", "Upstream-Status: 'Inappropriate' is not"),
        (b"Inappropriate [test]", b"Submitted", "Upstream-Status: 'Submitted' is not"),
        (b"Inappropriate [test]", b"Merged", "Upstream-Status: 'Merged' is not"),
        (b"Anchor: vllm/envs.py::Config.forward", b"Anchor: vllm/envs.py", "is not file::Qual.name"),
        (b"Drop-When: never", b"Drop-When: perhaps", "Drop-When: 'perhaps' is not"),
        (b"Drop-When: never", b"Drop-When: symbol:x", "does not follow the grammar"),
        (b"Live-When: always", b"Live-When: registry:x", "does not follow the grammar"),
        (b"Because the test says so.\n\n", b"", "does not say why"),
        (b"Subject: [PATCH] Change forward", b"Subject: [PATCH] " + b"long " * 20, "characters, at most 72"),
        (b"Subject: [PATCH] Change forward", b"Subject: [PATCH] WIP things", "not a finished subject"),
        (b"+        y = x + 2\n", b"+        y = x + 2 \n", "trailing whitespace"),
        (b"+        y = x + 2\n", b"+        y = x + 2\r\n", "ends in CR"),
        (b"+        y = x + 2\n", b"+        y = '/home/me/x'\n", "a path of one machine: /home/me"),
        (b"Because the test", b"In /work/here the test", "a path of one machine: /work/here"),
        (b"Because the test says so.", b"Because. ", "trailing whitespace in the message"),
    ],
)
def test_each_rule(patched: Project, old: bytes, new: bytes, expected: str) -> None:
    assert any(expected in row for row in _with(patched, old, new))
    result = patched.series("lint", "--json", code=1).json
    assert result["ok"] is False
    assert all(row["fix"] for row in result["problems"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"Inappropriate [test]", b"Pending"),
        (b"Inappropriate [test]", b"Submitted [https://github.com/vllm-project/vllm/pull/1]"),
        (b"Inappropriate [test]", b"Backport [0.34]"),
        (b"Drop-When: never", b"Drop-When: vllm>=0.34"),
        (b"Drop-When: never", b"Drop-When: when upstream reads the switch"),
        (b"Drop-When: never", b"Drop-When: symbol:vllm/a.py::B.c"),
        (b"Origin: none [written for a test]", b"Origin: https://github.com/vllm-project/vllm/pull/1"),
        (b"+        y = x + 2\n", b"+        y = x / home / 2  # https://example.org/home/x\n"),
    ],
)
def test_what_is_allowed(patched: Project, old: bytes, new: bytes) -> None:
    assert _with(patched, old, new) == []


def test_all_problems_are_reported_not_only_the_first(patched: Project) -> None:
    _with(patched, b"Feature: core\n", b"")
    rows = _with(patched, b"Drop-When: never", b"Drop-When: perhaps")
    assert len(rows) == 2


def test_series_problems_and_two_equal_subjects(patched: Project) -> None:
    (patched.patches / "other.patch").write_bytes((patched.patches / NAME).read_bytes())
    rows = [str(row) for row in lint(patched.ws, "0.9.0")]
    assert any("series does not name: other.patch" in row for row in rows)
    assert any("has the subject of change-forward.patch" in row for row in rows)


def test_overlay_rules(patched: Project) -> None:
    folder = patched.root / "overlay/vllm/dsa"
    (folder / "a.py").write_bytes(b"a = 1\r\n")
    (folder / "b.py").write_text("PATH = '/root/models'\n")
    (patched.root / "overlay/vllm/stray.py").write_text("")
    assert "lies outside" in str(lint(patched.ws, "0.9.0"))
    (patched.root / "overlay/vllm/stray.py").unlink()
    text = str(lint(patched.ws, "0.9.0"))
    assert "CRLF" in text
    assert "/root/models" in text
