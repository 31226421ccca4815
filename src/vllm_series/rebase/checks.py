"""What a patch promises about its place, asked of the new release: Anchor, Live-When, Drop-When."""

from __future__ import annotations

import re

from packaging.version import InvalidVersion, Version

from vllm_series import anchors, probes, upstreamed
from vllm_series.git import Git
from vllm_series.series import Patch
from vllm_series.trees import Tree
from vllm_series.workspace import Workspace

_FROM = re.compile(r"vllm(>=|>|==)(\d+(?:\.\d+)*)")


def anchor_problems(git: Git, before: str, after: str, patch: Patch) -> list[str]:
    """Return why the change between two commits is not inside the patch's anchors; empty if it is."""
    return anchors.check_patch(git, before, after, patch)


def missing_anchors(git: Git, old: str, new: str, patch: Patch) -> list[str]:
    """Return which anchors commit ``old`` has and ``new`` has not."""
    before, after = Tree(git, old), Tree(git, new)
    found = []
    for value in patch.get("Anchor"):
        anchor = anchors.parse(value)
        if anchor is None or anchor.name == anchors.MODULE or not anchor.file.endswith(".py"):
            continue
        if _has(before, anchor) and not _has(after, anchor):
            found.append(f"{anchor.file} has no {anchor.name} any more")
    return found


def _has(tree: Tree, anchor: anchors.Anchor) -> bool:
    try:
        source = tree.source(anchor.file)
    except SyntaxError:
        return False
    return bool(source and source.spans(anchor.name))


def live_problem(git: Git, commit: str, patch: Patch) -> str:
    """Return why no DSA model runs the patched code on this commit; '' if all its Live-When probes hold."""
    tree = Tree(git, commit)
    answers = [(text, probes.ask(tree, text)) for text in patch.get("Live-When")]
    return "; ".join(f"Live-When {text}: {answer.detail}" for text, answer in answers if not answer.ok)


def drop_reason(git: Git, commit: str, version: str, patch: Patch) -> str:
    """Return which Drop-When holds on the pristine release, '' if none; what only words describe is never
    taken to hold."""
    tree = Tree(git, commit)
    for text in patch.get("Drop-When"):
        if match := _FROM.fullmatch(text):
            if _holds(version, match[1], match[2]):
                return f"Drop-When: {text}"
        elif probes.is_probe(text) and not text.startswith("always"):
            answer = probes.ask(tree, text)
            if answer.ok:
                return f"Drop-When: {text} ({answer.detail})"
    return ""


def _holds(version: str, how: str, bound: str) -> bool:
    try:
        have, want = Version(version), Version(bound)
    except InvalidVersion:
        return False
    return {">=": have >= want, ">": have > want, "==": have == want}[how]


def unproven(ws: Workspace, line: str, git: Git, commit: str) -> list[str]:
    """Return the entries of a line's upstreamed.toml that do not hold on another release, in words."""
    return upstreamed.check(ws, line, Tree(git, commit))
