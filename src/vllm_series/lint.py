"""Rules for patches, series and overlay that can be checked without applying anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_series import anchors, overlay, pins, probes, series, upstreamed
from vllm_series.errors import CheckFailed, SeriesError
from vllm_series.series import Patch
from vllm_series.workspace import Workspace

REQUIRED = ("Feature", "Origin", "Upstream-Status", "Anchor", "Drop-When", "Live-When")
_REPEATABLE = {"Anchor", "Live-When", "Origin", "Signed-off-by", "Co-authored-by", "Link"}
_URL = r"https://[^\s]+"
_FEATURE = re.compile(r"[a-z][a-z0-9_-]*")
_ORIGIN = re.compile(rf"{_URL}( .+)?|none \[.+\]")
_STATUS = re.compile(
    rf"Pending( \[.+\])?|Submitted \[{_URL}\]|Denied \[.+\]|Inappropriate \[.+\]|Backport \[.+\]"
)
_DROP = re.compile(r"never( \[.+\])?|vllm(>=|>|==)\d+(\.\d+)*|merged https://[^\s]+|when .+")
_LOCAL_PATH = re.compile(r"(?<![\w./:$}<>~-])/(?:home|Users|root|work|opt|mnt|data)/[\w.-]+")
_TEXT_SUFFIXES = (
    ".py",
    ".cu",
    ".cuh",
    ".h",
    ".hpp",
    ".cpp",
    ".cmake",
    ".txt",
    ".md",
    ".toml",
    ".json",
    ".sh",
)
SUBJECT_LENGTH = 72


@dataclass(frozen=True)
class Problem:
    """One broken rule: ``where`` is a file (and line), ``fix`` what to do."""

    rule: str
    where: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: [{self.rule}] {self.message}\n    fix: {self.fix}"


def lint(ws: Workspace, line: str) -> list[Problem]:
    """Check one line and the overlay; returns every problem, not only the first."""
    found: list[Problem] = []
    where = f"patches/{line}"
    try:
        pins.load_pin(ws, line)
        upstreamed.load(ws, line)
        patches = series.load(ws, line)
    except CheckFailed as err:
        patches = _readable(ws, line)
        found.append(Problem("series", where, err.message, err.fix))
    seen: dict[str, str] = {}
    for patch in patches:
        found += _patch(f"{where}/{patch.name}", patch)
        other = seen.setdefault(patch.subject, patch.name)
        if other != patch.name:
            found.append(
                Problem(
                    "subject",
                    f"{where}/{patch.name}",
                    f"has the subject of {other}",
                    "give it its own subject",
                )
            )
    return [*found, *_overlay(ws)]


def _readable(ws: Workspace, line: str) -> list[Patch]:
    found = []
    for path in sorted(ws.patches(line).glob("*.patch")):
        try:
            found.append(series.parse(path.name, path.read_bytes()))
        except SeriesError:
            continue  # reported by series.load
    return found


def _patch(where: str, patch: Patch) -> Iterator[Problem]:
    edit = "reword the commit in build/ (git commit --amend, or rebase -i) and export"
    if len(patch.subject) > SUBJECT_LENGTH:
        yield Problem(
            "subject",
            where,
            f"the subject has {len(patch.subject)} characters, at most {SUBJECT_LENGTH}",
            edit,
        )
    if patch.subject.endswith(".") or re.match(r"(fixup|squash|amend|WIP|wip)\b", patch.subject):
        yield Problem("subject", where, f"not a finished subject: {patch.subject!r}", edit)
    if not _prose(patch):
        yield Problem("message", where, "the message does not say why the patch is there", edit)
    keys = {name.lower() for name, _ in patch.trailers}
    for key in REQUIRED:
        if key.lower() not in keys:
            yield Problem("trailer", where, f"the trailer {key} is missing", f"{edit}; see docs/patches.md")
    for name, value in patch.trailers:
        if name not in _REPEATABLE and len(patch.get(name)) > 1:
            yield Problem("trailer", where, f"{name} is there {len(patch.get(name))} times", edit)
        wrong = _GRAMMAR[name](value) if name in _GRAMMAR else ""
        if wrong:
            yield Problem("trailer", where, f"{name}: {wrong}", f"{edit}; see docs/patches.md")
    yield from _bytes(where, patch)


def _prose(patch: Patch) -> str:
    rows = [
        row
        for row in patch.body.splitlines()
        if not any(row.startswith(f"{name}:") for name, _ in patch.trailers)
    ]
    return "".join(rows).strip()


def _bytes(where: str, patch: Patch) -> Iterator[Problem]:
    head = patch.data[: len(patch.data) - len(series.diff_of(patch.data))]
    for number, row in enumerate(head.split(b"\n"), 1):
        if row != row.rstrip() and row != b"-- ":
            yield Problem(
                "whitespace", f"{where}:{number}", "trailing whitespace in the message", "reword and export"
            )
        yield from _path(f"{where}:{number}", row)
    shift = head.count(b"\n")
    for number, row in enumerate(series.diff_of(patch.data).split(b"\n"), shift + 1):
        if not row.startswith(b"+") or row.startswith(b"+++ "):
            continue
        if row.endswith(b"\r"):
            yield Problem("whitespace", f"{where}:{number}", "an added line ends in CR", "use LF and export")
        elif row[1:] != row[1:].rstrip():
            yield Problem(
                "whitespace",
                f"{where}:{number}",
                "an added line has trailing whitespace",
                "remove it, export",
            )
        yield from _path(f"{where}:{number}", row)


def _path(where: str, row: bytes) -> Iterator[Problem]:
    found = _LOCAL_PATH.search(row.decode("utf-8", "replace"))
    if found:
        yield Problem(
            "local-path",
            where,
            f"names a path of one machine: {found[0]}",
            "use a relative path or a variable",
        )


def _overlay(ws: Workspace) -> Iterator[Problem]:
    try:
        files = overlay.overlay_files(ws)
    except CheckFailed as err:
        yield Problem("overlay", "overlay", err.message, err.fix)
        return
    for path, file in files.items():
        if not path.endswith(_TEXT_SUFFIXES):
            continue
        data = file.read_bytes()
        if b"\r\n" in data:
            yield Problem("whitespace", f"overlay/{path}", "has CRLF line ends", "use LF")
        for number, row in enumerate(data.split(b"\n"), 1):
            yield from _path(f"overlay/{path}:{number}", row)


def _matches(pattern: re.Pattern[str], shape: str) -> Callable[[str], str]:
    return lambda value: "" if pattern.fullmatch(value) else f"{value!r} is not {shape}"


def _drop_when(value: str) -> str:
    if probes.is_probe(value) and not value.startswith("always"):
        return probes.problem(value)
    return "" if _DROP.fullmatch(value) else (
        f"{value!r} is not `never`, `vllm>=X.Y`, `merged URL`, `when <words>` or a probe"
    )  # fmt: skip


_GRAMMAR: dict[str, Callable[[str], str]] = {
    "Feature": _matches(_FEATURE, "a feature name (lower case)"),
    "Origin": _matches(_ORIGIN, "an https URL or `none [why]`"),
    "Upstream-Status": _matches(
        _STATUS, "Pending, Submitted [URL], Denied [why], Inappropriate [why] or Backport [release]"
    ),
    "Anchor": lambda value: "" if anchors.parse(value) else f"{value!r} is not file::Qual.name",
    "Drop-When": _drop_when,
    "Live-When": probes.problem,
}
