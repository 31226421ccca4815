"""Probes: questions about an upstream tree that are answered from its source, without importing vLLM.

Grammar (also in docs/patches.md):

    registry:ARCH=MODULE[:CLASS]   the model registry resolves ARCH to MODULE (or into that package)
    import:A>B[>C...]              a file of module or package A imports B, a file of B imports C, ...
    symbol:FILE::QUAL.NAME         FILE defines this function, class or name
    text:FILE[::QUAL.NAME]=REGEX   REGEX is found in FILE, or within that definition
    always                         holds on every tree (code that each run executes)
"""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import dataclass

from vllm_series.trees import Tree

REGISTRY = "vllm/model_executor/models/registry.py"
_LEGACY = "vllm.model_executor.models"
_ALWAYS = re.compile(r"always( \[.+\])?")
_MODULE = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_FORMS = {
    "registry": re.compile(rf"(?P<arch>\w+)=(?P<module>{_MODULE})(?::(?P<cls>\w+))?"),
    "import": re.compile(rf"{_MODULE}(?:>{_MODULE})+"),
    "symbol": re.compile(r"(?P<file>[^:=]+)::(?P<name>[\w.]+)"),
    "text": re.compile(r"(?P<file>[^:=]+)(?:::(?P<name>[\w.]+))?=(?P<regex>.+)", re.DOTALL),
}


@dataclass(frozen=True)
class Answer:
    """``ok`` and, in words, what was found or is missing."""

    ok: bool
    detail: str


def is_probe(text: str) -> bool:
    """Say whether ``text`` is meant as a probe: it starts with one of the kinds."""
    return bool(_ALWAYS.fullmatch(text)) or text.split(":", 1)[0] in _FORMS


def problem(text: str) -> str:
    """Return what is wrong with the grammar of a probe, '' if nothing is."""
    if _ALWAYS.fullmatch(text):
        return ""
    kind, _, rest = text.partition(":")
    if kind not in _FORMS:
        return f"{text!r} is not a probe (always, {', '.join(f'{name}:...' for name in _FORMS)})"
    found = _FORMS[kind].fullmatch(rest)
    if not found:
        return f"{text!r} does not follow the grammar of a {kind} probe"
    if kind == "text":
        try:
            re.compile(found["regex"])
        except re.error as err:
            return f"{text!r}: not a regular expression: {err}"
    return ""


def ask(tree: Tree, text: str) -> Answer:
    """Answer one probe on a tree; a malformed one is answered with its problem."""
    wrong = problem(text)
    if wrong:
        return Answer(False, wrong)
    if _ALWAYS.fullmatch(text):
        return Answer(True, "always")
    kind, _, rest = text.partition(":")
    found = _FORMS[kind].fullmatch(rest)
    assert found
    try:
        if kind == "registry":
            return _registry(tree, found["arch"], found["module"], found["cls"])
        if kind == "import":
            return _import(tree, rest.split(">"))
        if kind == "symbol":
            return _symbol(tree, found["file"], found["name"])
        return find_text(tree, found["file"], found["name"] or "", found["regex"])
    except SyntaxError as err:
        return Answer(False, f"{err.filename} is not Python that this interpreter reads: {err.msg}")


def registered(tree: Tree) -> dict[str, tuple[str, str]]:
    """Return ``{architecture: (full module name, class)}`` of the tree's model registry."""
    source = tree.source(REGISTRY)
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(source.tree) if source else ():
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            arch = key.value if isinstance(key, ast.Constant) else None
            pair = (
                [e.value for e in value.elts if isinstance(e, ast.Constant)]
                if isinstance(value, ast.Tuple)
                else []
            )
            if isinstance(arch, str) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
                module, cls = str(pair[0]), str(pair[1])
                found.setdefault(arch, (module if module.startswith("vllm.") else f"{_LEGACY}.{module}", cls))
    return found


def _registry(tree: Tree, arch: str, module: str, cls: str | None) -> Answer:
    entries = registered(tree)
    if arch not in entries:
        return Answer(False, f"{REGISTRY} does not register {arch}")
    there, name = entries[arch]
    if there != module and not there.startswith(module + "."):
        return Answer(False, f"{arch} is {there}:{name}, not in {module}")
    if cls and name != cls:
        return Answer(False, f"{arch} is the class {name}, not {cls}")
    if not tree.module_files(there):
        return Answer(False, f"{arch} is registered as {there}, which has no file")
    return Answer(True, f"{arch} is {there}:{name}")


def _import(tree: Tree, chain: list[str]) -> Answer:
    from vllm_series.pysource import imports

    for start, target in itertools.pairwise(chain):
        files = tree.module_files(start)
        if not files:
            return Answer(False, f"there is no module {start}")
        if not tree.module_files(target):
            return Answer(False, f"there is no module {target}")
        for file in files:
            if any(m == target or m.startswith(target + ".") for m in imports(tree.read(file) or b"", file)):
                break
        else:
            return Answer(False, f"no file of {start} imports {target}")
    return Answer(True, " imports ".join(chain))


def _symbol(tree: Tree, file: str, name: str) -> Answer:
    source = tree.source(file)
    if source is None:
        return Answer(False, f"{file} is not there")
    if not source.spans(name):
        return Answer(False, f"{file} has no {name}")
    return Answer(True, f"{file} has {name}")


def find_text(tree: Tree, file: str, name: str, regex: str) -> Answer:
    """Look for ``regex`` in a file, or within the definition ``name`` of it."""
    data = tree.read(file)
    if data is None:
        return Answer(False, f"{file} is not there")
    text, where = data.decode("utf-8", "replace"), file
    if name:
        source = tree.source(file)
        text, where = source.text_of(name) if source else "", f"{file}::{name}"
        if not text:
            return Answer(False, f"{file} has no {name}")
    if not re.search(regex, text):
        return Answer(False, f"{where} has no match of {regex!r}")
    return Answer(True, f"{where} matches {regex!r}")
