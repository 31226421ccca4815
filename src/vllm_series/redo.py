"""`series export LINE --as PATCH`: makes one patch anew that does not apply any more.

`series apply LINE --before PATCH` lays out the tree that the patch has to apply to; the one commit made
there becomes
the patch, and the rest of the series is left as it is.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_series import apply as applying
from vllm_series import export, importer, series, stack, state
from vllm_series.errors import CheckFailed, UsageError
from vllm_series.files import write_atomic
from vllm_series.git import Git
from vllm_series.pins import Pin
from vllm_series.state import STAMP, State
from vllm_series.workspace import Workspace


def write_one(ws: Workspace, pin: Pin, name: str) -> None:
    """Write the one commit on top of a tree of ``apply --before`` as ``patches/<line>/<name>``; takes the
    line's lock.

    Raises:
        UsageError: the series has no such patch, or the tree was not made by ``apply --before``.
        CheckFailed: there is not exactly one commit, or it touches the overlay.
        WouldLoseWork: uncommitted changes.
    """
    line = pin.line
    with applying.line_lock(ws, line):
        if name not in series.names(ws, line):
            raise UsageError(f"patches/{line}/series does not name {name}", fix="name one of its patches")
        found = state.inspect(ws, pin)
        state.require(found, line, {State.AHEAD, State.PARTIAL, State.PRISTINE, State.APPLIED, State.STALE})
        stamp, git, store = found.stamp, Git(found.path), importer.odb(ws)
        if found.head is None or stamp is None or stamp.complete:
            raise UsageError(
                f"build/{line} was not laid out to make {name} anew",
                fix=f"series apply {line} --before {name}, commit the change there, then this command again",
            )
        importer.fetch_ref(ws, found.path, "HEAD", f"refs/export/{line}")
        commits = export.collect(ws, store, stamp.head, found.head, line)
        if len(commits) != 1 or commits[0].overlay:
            raise CheckFailed(
                f"build/{line} has {len(commits)} commits on top, or one that touches the overlay; "
                f"{name} is one commit",
                fix=f"git -C {found.path} reset --soft {stamp.head[:12]}, "
                "and commit the upstream files as one",
            )
        patch = series.parse(name, store.raw(*export.FORMAT, commits[0].id))
        write_atomic(ws.patches(line) / name, patch.data)
        made = replace(
            stamp,
            key="",
            commits=(*stamp.commits, (name, found.head)),
            top=found.head,
            head=found.head,
            patches={**stamp.patches, name: patch.sha256},
        )
        stack.write_ref(git, STAMP, made)
