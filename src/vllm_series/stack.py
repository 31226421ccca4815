"""Builds a line's commits in the object store: imported base, one commit per patch, the overlay as the last
one.

The ids depend on pin, patches and overlay alone, so two machines get the same commits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_series import importer, overlay, scratch, series
from vllm_series.errors import CheckFailed
from vllm_series.files import sha256_of
from vllm_series.git import Git
from vllm_series.pins import Pin
from vllm_series.series import Patch
from vllm_series.workspace import Workspace

RECIPE = 1  # raise when the same input would give other commits
OVERLAY_SUBJECT = "overlay"
OVERLAY_MESSAGE = f"{OVERLAY_SUBJECT}\n\nFiles of the series that upstream does not have.\n"


@dataclass(frozen=True)
class Stack:
    """The commits of one line. ``top`` is the last patch's commit (the base without patches), ``head`` the
    overlay's."""

    key: str
    line: str
    base: str
    commits: tuple[tuple[str, str], ...]  # (patch name, commit id) in order
    top: str
    head: str
    patches: Mapping[str, str]  # patch name -> sha256 of the file
    overlay: Mapping[str, str]  # path -> "mode blob"
    complete: bool = True  # False: only the first patches, no overlay

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Stack | None:
        try:
            data: dict[str, Any] = json.loads(text)
            data["commits"] = tuple((name, commit) for name, commit in data["commits"])
            return cls(**data)
        except (ValueError, KeyError, TypeError):
            return None


def key_of(base: str, patches: Sequence[Patch], laid: Mapping[str, tuple[str, str]]) -> str:
    """Return a hash over everything that the commits depend on."""
    parts = [RECIPE, base, [(p.name, p.sha256) for p in patches], sorted((k, *v) for k, v in laid.items())]
    return sha256_of(json.dumps(parts).encode())


def stack_ref(line: str) -> str:
    return f"refs/heads/series/{line}"


def build(
    ws: Workspace,
    pin: Pin,
    patches: Sequence[Patch],
    files: Mapping[str, Path],
    *,
    base: str | None = None,
    name: str | None = None,
    complete: bool = True,
) -> Stack:
    """Apply ``patches`` strictly in a scratch work tree and lay the overlay on top; touches no ref and no
    user file.

    ``base`` defaults to the pin's import. The caller holds the line's lock (or passes its own scratch
    ``name``).

    Raises:
        CheckFailed: a patch does not apply, or the overlay shadows a file.
    """
    store = importer.odb(ws)
    base = base or importer.import_pin(ws, pin)
    commits = _am(ws, store, base, patches, name or f"apply-{pin.line}", pin.line) if patches else []
    top = commits[-1] if commits else base
    laid = overlay.store(store, files) if complete else {}
    if laid:
        overlay.check_shadow(laid, store.paths("ls-tree", "-r", "-z", "--name-only", top), f"line {pin.line}")
    head = lay(ws, store, top, laid) if laid else top
    return Stack(
        key=key_of(base, patches, laid),
        line=pin.line,
        base=base,
        commits=tuple((p.name, c) for p, c in zip(patches, commits, strict=True)),
        top=top,
        head=head,
        patches={p.name: p.sha256 for p in patches},
        overlay={path: " ".join(row) for path, row in sorted(laid.items())},
        complete=complete,
    )


def current(ws: Workspace, pin: Pin, *, base: str | None = None) -> Stack:
    """Return the stack of what is on disk now, from the object store if it was built before.

    Raises:
        CheckFailed: series, patches or overlay are not valid.
    """
    store = importer.odb(ws)
    base = base or importer.import_pin(ws, pin)
    patches, files = series.load(ws, pin.line), overlay.overlay_files(ws)
    key = key_of(base, patches, overlay.entries(ws))
    known = read_ref(store, f"refs/stacks/{key}")
    if known and known.key == key and store.commit_of(known.head):
        return known
    made = build(ws, pin, patches, files, base=base)
    write_ref(store, f"refs/stacks/{key}", made)
    return made


def read_ref(git: Git, ref: str) -> Stack | None:
    """Read a stack that was recorded as a blob under ``ref``."""
    done = git.run("cat-file", "blob", ref, check=False)
    return Stack.from_json(done.stdout.decode("utf-8", "replace")) if done.returncode == 0 else None


def write_ref(git: Git, ref: str, made: Stack) -> None:
    blob = git.out("hash-object", "-w", "--stdin", data=made.to_json().encode())
    git.set_ref(ref, blob)


def _am(ws: Workspace, store: Git, base: str, patches: Sequence[Patch], name: str, line: str) -> list[str]:
    only = sorted({path for patch in patches for path in patch.paths})
    with scratch.work_tree(store, ws, base, name, only) as tree, scratch.folder(ws, "mails") as tmp:
        mails = []
        for number, patch in enumerate(patches):
            mail = tmp / f"{number:04d}"
            mail.write_bytes(patch.data)
            mails.append(str(mail))
        done = tree.run(
            "am", "-q", "--keep-non-patch", "--keep-cr", "--no-3way", "--no-scissors", "--no-gpg-sign",
            "--quoted-cr=nowarn", "--empty=stop", "--patch-format=mbox", *mails, check=False,
        )  # fmt: skip
        commits = tree.lines("rev-list", "--reverse", f"{base}..HEAD")
        if done.returncode != 0:
            failed = patches[len(commits)].name if len(commits) < len(patches) else patches[-1].name
            why = (done.stderr + done.stdout).decode("utf-8", "replace")
            raise _does_not_apply(line, failed, len(commits), len(patches), why)
        if len(commits) != len(patches):
            raise CheckFailed(
                f"line {line}: {len(patches)} patches gave {len(commits)} commits", fix=f"series lint {line}"
            )
        return commits


def _does_not_apply(line: str, name: str, before: int, total: int, why: str) -> CheckFailed:
    wanted = [row for row in why.splitlines() if re.match(r"(error|fatal):", row)]
    said = "\n    ".join(wanted or why.strip().splitlines()[:6])
    return CheckFailed(
        f"line {line}: {name} (patch {before + 1} of {total}) does not apply:\n    {said}",
        fix=f"series apply {line} --before {name}, commit the change anew in build/{line}, "
        f"series export {line} --as {name}; or restore the patches: git checkout -- patches",
    )


def lay(ws: Workspace, store: Git, top: str, laid: Mapping[str, tuple[str, str]]) -> str:
    """Commit the overlay's entries on top of ``top``; return the commit id."""
    with scratch.folder(ws, "index") as tmp:
        git = store.with_env(GIT_INDEX_FILE=os.fspath(tmp / "index"))
        git.run("read-tree", top)
        rows = "".join(f"{mode} {blob}\t{path}\0" for path, (mode, blob) in sorted(laid.items()))
        git.run("update-index", "-z", "--index-info", data=rows.encode())
        tree = git.out("write-tree")
    return store.out("commit-tree", tree, "-p", top, "-F", "-", data=OVERLAY_MESSAGE.encode())
