"""Every import of vllm.dsa that a patch adds is behind a switch that reads as off while VLLM_DSA=0."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_series import apply as applying
from vllm_series.importer import odb
from vllm_series.pins import lines, load_pin
from vllm_series.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]

#: What vllm.envs gives with VLLM_DSA=0 (overlay/tests/dsa/test_switches.py proves it on the real module).
OFF = SimpleNamespace(
    VLLM_DSA=False,
    VLLM_DISABLE_INDEXER_STREAM=True,
    VLLM_INDEXER_OVERLAP="off",
    VLLM_LITETOPK=False,
    VLLM_LITETOPK_DISPATCH="measured",
    VLLM_LITETOPK_MIN_KEYS=0,
    VLLM_LITEDSA=False,
    VLLM_DSA_FUSED_Q="off",
    VLLM_INDEXER_LOGITS_SLAB="off",
)


class Anything:
    """A name of the patched code that is not known here: it counts as true, whatever is done with it."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *arguments: Any, **keywords: Any) -> Anything:
        return self

    def __getitem__(self, key: Any) -> Anything:
        return self

    def __bool__(self) -> bool:
        return True

    def _true(self, other: object) -> bool:
        return True

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _true  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return Anything()


def holds_when_off(test: ast.expr) -> bool:
    """Whether a condition can be true with VLLM_DSA=0; one that cannot be evaluated can."""
    code = compile(ast.Expression(test), "<guard>", "eval")
    try:
        return bool(eval(code, {"__builtins__": {}}, Names(envs=OFF)))
    except Exception:
        return True


def is_ours(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith("vllm.dsa") or (
            node.module == "vllm" and any(name.name == "dsa" for name in node.names)
        )
    return isinstance(node, ast.Import) and any(name.name.startswith("vllm.dsa") for name in node.names)


def unguarded(text: str) -> list[int]:
    """Return the lines of imports of vllm.dsa that can run with VLLM_DSA=0."""
    found: list[int] = []

    def walk(node: ast.AST, guards: tuple[ast.expr, ...]) -> None:
        if is_ours(node) and all(holds_when_off(guard) for guard in guards):
            found.append(getattr(node, "lineno", 0))
        if isinstance(node, ast.If):
            for child in node.body:
                walk(child, (*guards, node.test))
            for child in node.orelse:
                walk(child, guards)
            return
        for child in ast.iter_child_nodes(node):
            walk(child, guards)

    walk(ast.parse(text), ())
    return found


@pytest.mark.parametrize(
    ("text", "lines_"),
    [
        ("import vllm.dsa", [1]),
        ("from vllm import dsa", [1]),
        ("if envs.VLLM_DSA:\n    from vllm.dsa import x", []),
        ("if envs.VLLM_DSA:\n    pass\nelse:\n    from vllm.dsa import x", [4]),
        ("if envs.VLLM_INDEXER_OVERLAP != 'off' and self.fits(x):\n    import vllm.dsa.x", []),
        ("if envs.VLLM_INDEXER_OVERLAP != 'wk':\n    import vllm.dsa.x", [2]),
        ("if not envs.VLLM_DISABLE_INDEXER_STREAM:\n    def f():\n        import vllm.dsa.x", []),
        ("if x or envs.VLLM_LITETOPK:\n    import vllm.dsa.x", [2]),
        ("if n + 1:\n    import vllm.dsa.x", [2]),
        ("if n > 3:\n    import vllm.dsa.x", [2]),
    ],
)
def test_the_check_itself(text: str, lines_: list[int]) -> None:
    assert unguarded(text) == lines_


@pytest.mark.slow
@pytest.mark.parametrize("line", lines(Workspace(ROOT)))
def test_imports_are_guarded(line: str) -> None:
    ws = Workspace(ROOT)
    made = applying.ensure(ws, load_pin(ws, line))
    store = odb(ws)
    seen = 0
    for path in store.changed(made.base, made.top):
        if path.endswith(".py"):
            text = (store.blob(made.top, path) or b"").decode()
            seen += "vllm.dsa" in text
            assert unguarded(text) == [], f"{line}: {path} imports vllm.dsa with VLLM_DSA=0"
    assert seen
