"""The patches of a line as an export would write them, as a diff that a person can take as it is."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from vllm_series import apply as applying
from vllm_series import export, importer, lock, scratch, series, stack
from vllm_series.errors import CheckFailed
from vllm_series.git import Git
from vllm_series.pins import Pin
from vllm_series.series import Patch
from vllm_series.stack import Stack
from vllm_series.workspace import Workspace


def refresh(ws: Workspace, pin: Pin) -> bytes:
    """Return a diff of ``patches/<line>`` for `git apply`, empty if the patches are as an export writes them.

    Patches that do not apply strictly are tried with a 3-way merge on the blobs that they name.

    Raises:
        CheckFailed: a patch needs a person, because it does not merge either.
    """
    with applying.line_lock(ws, pin.line):
        patches = series.load(ws, pin.line)
        store = importer.odb(ws)
        name = f"refresh-{pin.line}"
        try:
            made = stack.build(ws, pin, patches, {}, name=name)
        except CheckFailed:
            made = _merged(ws, pin, store, patches, name)
        commits = export.collect(ws, store, made.base, made.top, pin.line)
        plan = export.plan_patches(store, commits, patches, made, (), pin.line)
        proved = stack.build(ws, pin, plan.patches, {}, name=name)
        if store.tree_of(proved.top) != store.tree_of(made.top):
            raise CheckFailed(f"line {pin.line}: the refreshed patches give another tree", fix="report this")
        after = {patch.name: patch.data for patch in plan.patches}
        after["LOCK"] = lock.lock_of(ws, proved).text().encode()
        before = {patch.name: patch.data for patch in patches}
        locked = ws.patches(pin.line) / "LOCK"
        if locked.is_file():
            before["LOCK"] = locked.read_bytes()
    return _diff(before, after, f"patches/{pin.line}")


def _merged(ws: Workspace, pin: Pin, store: Git, patches: Sequence[Patch], name: str) -> Stack:
    base = importer.import_pin(ws, pin)
    commits: list[tuple[str, str]] = []
    with scratch.work_tree(store, ws, base, name) as tree, tempfile.TemporaryDirectory() as folder:
        for patch in patches:
            mail = Path(folder) / "mail"
            mail.write_bytes(patch.data)
            before = tree.out("rev-parse", "HEAD")
            options = ("-q", "--3way", "--keep-non-patch", "--keep-cr", "--no-scissors", "--no-gpg-sign")
            done = tree.run("am", *options, "--patch-format=mbox", str(mail), check=False)
            head = tree.out("rev-parse", "HEAD")
            if done.returncode or head == before:
                said = (done.stderr + done.stdout).decode("utf-8", "replace").strip().splitlines()
                raise CheckFailed(
                    f"line {pin.line}: {patch.name} does not merge by itself: {'; '.join(said[:4])}",
                    fix=f"series apply {pin.line} --before {patch.name}, make the change anew there, "
                    f"series export {pin.line} --as {patch.name}",
                )
            commits.append((patch.name, head))
    top = commits[-1][1] if commits else base
    shas = {patch.name: patch.sha256 for patch in patches}
    return Stack("", pin.line, base, tuple(commits), top, top, shas, {}, complete=False)


def _diff(before: dict[str, bytes], after: dict[str, bytes], place: str) -> bytes:
    """Return the change as git writes it, with paths from the checkout's root."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        git = Git(root)
        git.run("init", "-q")
        folder = root / place
        folder.mkdir(parents=True)
        for files in (before, after):
            for file in folder.iterdir():
                file.unlink()
            for file_name, data in files.items():
                (folder / file_name).write_bytes(data)
            git.run("add", "-A")
            if files is before:
                git.run("commit", "-q", "--allow-empty", "-m", "before")
        return git.raw("diff", "--cached", "--full-index", "--binary", "--no-ext-diff", "HEAD")
