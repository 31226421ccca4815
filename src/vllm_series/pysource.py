"""Finds named things in Python source by their qualified name, with `ast` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Source:
    """One Python file.

    A qualified name is a dotted path of functions, classes, assigned names, and ``TYPE_CHECKING`` for the
    block
    ``if TYPE_CHECKING:``, for example ``Indexer.forward`` or ``environment_variables``.

    Raises:
        SyntaxError: the file is not Python.
    """

    def __init__(self, data: bytes, path: str) -> None:
        self.text = data.decode("utf-8", "replace")
        self.lines = self.text.split("\n")
        self.tree = ast.parse(data, path)

    def spans(self, name: str) -> list[tuple[int, int]]:
        """Return the line ranges (first, last; from 1) of everything that has this qualified name."""
        return [self._span(node) for node in _find(self.tree, name.split("."))]

    def text_of(self, name: str) -> str:
        """Return the source of everything with this name, '' if there is none."""
        return "\n".join("\n".join(self.lines[a - 1 : b]) for a, b in self.spans(name))

    def inside_definition(self, line: int) -> bool:
        """Say whether a line lies in a top-level function or class, decorators included."""
        return any(first <= line <= last for first, last in self._definitions)

    def is_blank(self, line: int) -> bool:
        return not self.lines[line - 1].strip()

    def owner(self, line: int) -> str:
        """Return the qualified name of the innermost function or class around a line, ``<module>`` if
        none."""
        name, best = "<module>", 0
        for qualified, node in _definitions(self.tree, ""):
            first, last = self._span(node)
            if first <= line <= last and first >= best:
                name, best = qualified, first
        return name

    @cached_property
    def _definitions(self) -> list[tuple[int, int]]:
        return [self._span(node) for _, node in _definitions(self.tree, "", deep=False)]

    def _span(self, node: ast.stmt) -> tuple[int, int]:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        last = node.end_lineno or node.lineno
        if isinstance(node, Named | ast.If):
            last = self._with_comments(last, node.col_offset)
        return first, last

    def _with_comments(self, last: int, column: int) -> int:
        """Let a block reach over comments after its last statement that are indented deeper than its head."""
        line = last
        while line < len(self.lines):
            row = self.lines[line]
            if row.strip() and not (row.strip().startswith("#") and len(row) - len(row.lstrip()) > column):
                break
            line += 1
            if row.strip():
                last = line
        return last


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, also those nested in if, try, with and loops, but not of inner
    scopes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case) and not isinstance(child, Named):
            yield from _statements(child)


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, Named):
        yield node.name
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))
    elif isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.If) and _is_type_checking(node.test):
        yield "TYPE_CHECKING"


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _find(scope: ast.AST, parts: list[str]) -> Iterator[ast.stmt]:
    for node in _statements(scope):
        if parts[0] in _names(node):
            if len(parts) == 1:
                yield node
            elif isinstance(node, Named):
                yield from _find(node, parts[1:])


def _definitions(scope: ast.AST, prefix: str, *, deep: bool = True) -> Iterator[tuple[str, Named]]:
    for node in _statements(scope):
        if isinstance(node, Named):
            yield prefix + node.name, node
            if deep:
                yield from _definitions(node, f"{prefix}{node.name}.")


def imports(data: bytes, path: str) -> set[str]:
    """Return the modules that a file names in import statements anywhere, relative ones resolved.

    ``from a import b`` gives both ``a`` and ``a.b``, because ``b`` may be a module.
    """
    parts = path.removesuffix(".py").split("/")
    package = parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(data, path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found
