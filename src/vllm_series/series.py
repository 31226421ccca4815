"""The series file and the patch mails it names. Everything above a patch's diff is kept as opaque bytes."""

from __future__ import annotations

import email.parser
import email.policy
import re
from dataclasses import dataclass
from pathlib import Path

from vllm_series.errors import CheckFailed
from vllm_series.files import sha256_of
from vllm_series.git import Git
from vllm_series.workspace import Workspace

NAME = re.compile(r"^[a-z0-9][a-z0-9._-]*\.patch$")
_DIFF = re.compile(rb"^diff --git ", re.MULTILINE)
_HUNK = re.compile(rb"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@.*$")
_PATH = re.compile(rb'^(?:---|\+\+\+) (?:"?[ab]/)(.+?)"?\t?$')


@dataclass(frozen=True)
class Patch:
    """One patch file. ``trailers`` keeps order and repeats; ``body`` is the message without subject and
    trailers."""

    name: str
    data: bytes
    subject: str
    body: str
    author: str
    trailers: tuple[tuple[str, str], ...]

    @property
    def sha256(self) -> str:
        return sha256_of(self.data)

    def get(self, key: str) -> list[str]:
        """Return all values of a trailer, compared without regard to case."""
        return [value for name, value in self.trailers if name.lower() == key.lower()]

    @property
    def paths(self) -> list[str]:
        """Files that the patch touches, sorted."""
        return sorted(touched(self.data))


def series_path(ws: Workspace, line: str) -> Path:
    return ws.patches(line) / "series"


def names(ws: Workspace, line: str) -> list[str]:
    """Return the patch names of a line in order.

    Raises:
        CheckFailed: the file is missing, or an entry is malformed or there twice.
    """
    path = series_path(ws, line)
    if not path.is_file():
        raise CheckFailed(f"patches/{line}/series is missing", fix=f"git checkout -- patches/{line}/series")
    found: list[str] = []
    for number, row in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        entry = row.strip()
        if not entry or entry.startswith("#"):
            continue
        if not NAME.match(entry):
            raise CheckFailed(
                f"patches/{line}/series:{number}: {entry!r} is not a patch file name",
                fix="one name a line, lower case, ending in .patch; comments start with #",
            )
        if entry in found:
            raise CheckFailed(
                f"patches/{line}/series:{number}: {entry} is there twice", fix="remove one of the two lines"
            )
        found.append(entry)
    return found


def load(ws: Workspace, line: str) -> list[Patch]:
    """Return the patches of a line in order.

    Raises:
        CheckFailed: series and folder do not agree, or a patch is not a mail with a diff.
    """
    folder = ws.patches(line)
    wanted = names(ws, line)
    there = {path.name for path in folder.glob("*.patch")}
    lost = [name for name in wanted if name not in there]
    if lost:
        raise CheckFailed(
            f"patches/{line}/series names files that are not there: {', '.join(lost)}",
            fix=f"restore them (git checkout -- patches/{line}) or take their lines out of the series",
        )
    unused = sorted(there - set(wanted))
    if unused:
        raise CheckFailed(
            f"patches/{line} holds files that its series does not name: {', '.join(unused)}",
            fix=f"add them to patches/{line}/series in the right place, or remove them",
        )
    return [parse(name, (folder / name).read_bytes()) for name in wanted]


def load_present(ws: Workspace, line: str) -> list[Patch]:
    """Return the patches that are there, whatever the series says, sorted by name."""
    return [parse(path.name, path.read_bytes()) for path in sorted(ws.patches(line).glob("*.patch"))]


def parse(name: str, data: bytes) -> Patch:
    """Read one patch mail.

    Raises:
        CheckFailed: it is not a mail with a subject and a diff.
    """
    if not data.startswith(b"From ") or not _DIFF.search(data):
        raise CheckFailed(f"{name} is not a git patch mail", fix="write it with `series export`")
    if len(re.findall(rb"(?m)^From [0-9a-f]{40} Mon Sep 17 00:00:00 2001$", data)) > 1:
        raise CheckFailed(f"{name} holds more than one mail", fix="one patch a file: split it")
    head = data.split(b"\n", 1)[1]
    mail = email.parser.BytesParser(policy=email.policy.default).parsebytes(_before_diff(head))
    subject = re.sub(r"^\[PATCH[^\]]*\]\s*", "", " ".join(str(mail["subject"] or "").split()))
    if not subject:
        raise CheckFailed(f"{name} has no subject", fix="write it with `series export`")
    text = _before_diff(data).split(b"\n\n", 1)
    message = text[1] if len(text) > 1 else b""
    message = re.split(rb"(?m)^---$", message)[0]
    rows = Git(Path.cwd()).lines(
        "interpret-trailers", "--parse", "--no-divider", data=b"subject\n\n" + message.strip(b"\n") + b"\n"
    )
    trailers = tuple(
        (row.split(":", 1)[0].strip(), row.split(":", 1)[1].strip()) for row in rows if ":" in row
    )
    body = message.decode("utf-8", "replace").strip("\n")
    return Patch(name, data, subject, body, str(mail["from"] or ""), trailers)


def _before_diff(data: bytes) -> bytes:
    found = _DIFF.search(data)
    return data[: found.start()] if found else data


def diff_of(data: bytes) -> bytes:
    found = _DIFF.search(data)
    return data[found.start() :] if found else b""


def touched(data: bytes) -> set[str]:
    """Return the files that the diffs in ``data`` touch, old and new names."""
    found: set[str] = set()
    for row in diff_of(data).split(b"\n"):
        if row.startswith(b"diff --git a/") and b" b/" in row:
            old, new = row[len(b"diff --git a/") :].split(b" b/", 1)
            found.update((old.decode(), new.decode()))
        elif match := _PATH.match(row):
            found.add(match[1].decode())
    return found


def effect(data: bytes) -> bytes:
    """Return the diff without what moves when other patches change: blob ids, line numbers, hunk headings."""
    rows = []
    for row in diff_of(data).rstrip(b"\n").split(b"\n"):
        if re.match(rb"^index [0-9a-f]+\.\.[0-9a-f]+", row):
            continue
        hunk = _HUNK.match(row)
        rows.append(b"@@ %s %s @@" % (hunk[1] or b"1", hunk[2] or b"1") if hunk else row)
    return b"\n".join(rows)
