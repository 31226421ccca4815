"""Anchors: every added line lies inside a named place."""

from __future__ import annotations

import pytest
from core_lab import TRAILERS, Project

from vllm_series import anchors
from vllm_series.git import Git
from vllm_series.pysource import Source, imports

TEXT = '''import os

try:
    import fast
except ImportError:
    fast = None

if TYPE_CHECKING:
    PORT: int = 1

table: dict = {
    "a": 1,
}
x, y = 1, 2


@decorator(
    1,
)
class A(Base):
    """Doc."""

    size = 1

    def f(self):
        return 1
        # a remark at the end

    @property
    def g(self):
        def inner():
            return 2

        return inner

    async def h(self):
        pass


def last():
    return 0
'''


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("TYPE_CHECKING", 8, 9),
        ("table", 11, 13),
        ("x", 14, 14),
        ("y", 14, 14),
        ("fast", 6, 6),
        ("A", 17, 38),
        ("A.size", 23, 23),
        ("A.f", 25, 27),
        ("A.g", 29, 34),
        ("A.g.inner", 31, 32),
        ("A.h", 36, 37),
        ("last", 40, 41),
    ],
)
def test_spans(name: str, first: int, last: int) -> None:
    lines = TEXT.split("\n")
    span = Source(TEXT.encode(), "a.py").spans(name)
    assert len(span) == 1
    if name == "A":
        assert span[0][0] == 17
        assert span[0][1] < 40
    else:
        assert span == [(first, last)], lines[first - 1]


def test_unknown_names_have_no_span_and_lines_have_owners() -> None:
    source = Source(TEXT.encode(), "a.py")
    assert source.spans("B") == source.spans("A.nope") == source.spans("table.a") == []
    assert source.owner(1) == "<module>"
    assert source.owner(32) == "A.g.inner"
    assert source.owner(23) == "A"
    assert source.inside_definition(18)
    assert not source.inside_definition(12)


def test_relative_imports_are_resolved() -> None:
    data = b"from . import a\nfrom .b import c\nfrom ..d import e\nimport f.g\nfrom h import i\n"
    found = imports(data, "p/q/m.py")
    assert {"p.q.a", "p.q.b", "p.q.b.c", "p.d", "p.d.e", "f.g", "h", "h.i"} <= found
    assert "p.q.a" in imports(b"from . import a\n", "p/q/__init__.py")


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ("a/b.py::C.d", True),
        ("a/b.py::", True),
        ("a/b.py::<module>", True),
        ("a/b.py", False),
        ("/a/b.py::C", False),
        ("../b.py::C", False),
        ("a/b.py::C-d", False),
        ("::C", False),
    ],
)
def test_grammar(text: str, ok: bool) -> None:
    assert (anchors.parse(text) is not None) is ok


def _check(project: Project, edits: list[tuple[str, str, str]], *named: str) -> list[str]:
    """Commit edits on the import and check them against anchors."""
    if not project.tree.exists():
        project.apply()
    for path, old, new in edits:
        if old == "":
            (project.tree / path).write_text(new)
        else:
            project.edit(path, old, new)
    project.commit("x")
    parsed = [anchor for name in named if (anchor := anchors.parse(name))]
    git = Git(project.tree)
    return anchors.check(git, git.out("rev-parse", "HEAD^"), git.out("rev-parse", "HEAD"), parsed)


ENVS = "vllm/envs.py"


def test_line_inside_and_outside(project: Project) -> None:
    inside = [(ENVS, "y = x + 1", "y = x + 2")]
    assert _check(project, inside, f"{ENVS}::Config.forward") == []
    outside = [(ENVS, "y = x - 1", "y = x - 2")]
    problem = _check(project, outside, f"{ENVS}::Config.forward")
    assert len(problem) == 2
    assert problem[0] == (
        f"{ENVS}:27 ('y = x - 2') lies in Config.backward, outside of {ENVS}::Config.forward"
    )
    assert problem[1].endswith("the patch changes nothing there")
    assert _check(project, [(ENVS, "y = x - 2", "y = x - 3")], f"{ENVS}::Config") == []


def test_module_level(project: Project) -> None:
    assert _check(project, [(ENVS, "import os\n", "import os\nimport re\n")], f"{ENVS}::") == []
    problem = _check(project, [(ENVS, "y = x + 1", "y = x + 3")], f"{ENVS}::")
    assert "lies in Config.forward" in problem[0]
    assert _check(project, [(ENVS, "import re\n", "import re\nimport sys\n")], f"{ENVS}::Config")[0].count(
        "<module>"
    )
    assert (
        _check(project, [(ENVS, '1")),\n', '1")),\n    "B": 2,\n')], f"{ENVS}::environment_variables") == []
    )
    assert (
        _check(
            project,
            [(ENVS, "VLLM_PORT: int = 1", "VLLM_PORT: int = 1\n    B: int = 2")],
            f"{ENVS}::TYPE_CHECKING",
        )
        == []
    )


def test_new_function_with_blank_lines_around(project: Project) -> None:
    edit = [(ENVS, "class Config:", "def fresh():\n    return 1\n    # remark\n\n\nclass Config:")]
    assert _check(project, edit, f"{ENVS}::fresh") == []


def test_removal_alone_needs_an_anchor_that_was_there(project: Project) -> None:
    assert _check(project, [(ENVS, "        y = x - 1\n", "")], f"{ENVS}::Config.backward") == []
    problem = _check(project, [(ENVS, "    size = 1\n", "")], f"{ENVS}::Config.nope")
    assert problem == [f"Anchor {ENVS}::Config.nope: the patch changes nothing there"]


def test_removal_elsewhere_does_not_justify_an_anchor(project: Project) -> None:
    edits = [(ENVS, "        y = x - 1\n", ""), (ENVS, "y = x + 1", "y = x + 2")]
    assert _check(project, edits, f"{ENVS}::Config") == []
    named = (f"{ENVS}::Config.forward", f"{ENVS}::Config.backward")
    assert _check(project, [(ENVS, "        return y\n\n", "\n")], *named) == [
        f"Anchor {named[1]}: the patch changes nothing there"
    ]


def test_file_without_anchor_and_anchor_without_change(project: Project) -> None:
    problem = _check(project, [("README.md", "upstream", "Upstream")], f"{ENVS}::Config")
    assert "README.md is changed but no Anchor names it" in problem
    assert f"Anchor {ENVS}::Config: the patch does not touch {ENVS}" in problem


def test_other_files_have_only_the_whole_file(project: Project) -> None:
    assert _check(project, [("README.md", "upstream", "Upstream")], "README.md::") == []
    assert (
        "only `README.md::` can be named" in _check(project, [("README.md", "Up", "up")], "README.md::x")[0]
    )


def test_new_python_file(project: Project) -> None:
    assert _check(project, [("vllm/fresh.py", "", "def f():\n    return 1\n")], "vllm/fresh.py::") == []
    assert (
        "is new"
        in _check(project, [("vllm/fresh2.py", "", "def f():\n    return 1\n")], "vllm/fresh2.py::f")[0]
    )


def test_misplaced_patch_fails_verify(project: Project) -> None:
    project.apply()
    project.edit(ENVS, "y = x - 1", "y = x - 2")
    project.commit(f"Change the wrong function\n\nWhy.\n\n{TRAILERS}")
    project.series("export", "0.9.0")
    result = project.series("verify", "--json", code=1).json
    step = next(row for row in result["lines"]["0.9.0"] if row["name"] == "anchors")
    assert step["ok"] is False
    assert "lies in Config.backward, outside of vllm/envs.py::Config.forward" in step["error"]
    assert "Anchor" in step["fix"]
