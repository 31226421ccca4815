"""A patch of ``patches/deepgemm/``: what it belongs to, whether a source has it, and putting it there."""

from __future__ import annotations

import enum
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vllm_series.errors import CheckFailed, IntegrityError, UsageError
from vllm_series.files import sha256_file
from vllm_series.git import clean_env, require_git
from vllm_series.pins import Pin
from vllm_series.workspace import Workspace

FOLDER = "deepgemm"  # under patches/
#: Where cmake reads the patch of a line in the patched tree: a copy, which `check_copies` keeps equal.
OVERLAY = "csrc/dsa/deepgemm"
#: A file that only a patched source has.
MARKER = "csrc/apis/mqa_logits_out.hpp"
_APPLIES_TO = re.compile(
    r"^Applies-To: (?P<kind>git|pypi) (?P<what>\S+) (?P<id>\S+)(?: (?P<sha256>[0-9a-f]{64}))?$", re.M
)


class State(enum.StrEnum):
    """What a DeepGEMM source is to a patch."""

    PATCHED = "patched"
    UNPATCHED = "unpatched"
    WRONG = "wrong source"


@dataclass(frozen=True)
class DeepGemmPatch:
    """One patch file.

    Attributes:
        file: where it is.
        kind: ``git`` for a pin of a line, ``pypi`` for the reference.
        what: URL of the repository, or name of the project.
        id: commit, or version.
        sha256: of the source archive; '' for ``git``.
    """

    file: Path
    kind: str
    what: str
    id: str
    sha256: str

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def digest(self) -> str:
        return sha256_file(self.file)

    def state(self, source: Path) -> State:
        """Say what ``source``, the top folder of a DeepGEMM source, is. Nothing in it is changed."""
        if self._apply(source, "--check", "--reverse") == "":
            return State.PATCHED
        return State.UNPATCHED if self._apply(source, "--check") == "" else State.WRONG

    def apply(self, source: Path) -> bool:
        """Patch ``source``; returns False if it had the patch already.

        Raises:
            UsageError: it is not a folder.
            CheckFailed: the patch does not apply to it; nothing was changed.
        """
        if not source.is_dir():
            raise UsageError(f"{source} is not a folder", fix="name the top folder of a DeepGEMM source")
        if self._apply(source, "--check", "--reverse") == "":
            return False
        said = self._apply(source)
        if said or not (source / MARKER).is_file():
            raise CheckFailed(
                f"{self.file.name} does not apply to {source}: {said}",
                fix=f"use the source it belongs to: {self.what} {self.id}",
            )
        return True

    def _apply(self, source: Path, *options: str) -> str:
        """Run a strict ``git apply`` (no fuzz) and return '' or what it said."""
        argv = [require_git(), "-c", "core.autocrlf=false", "-c", "apply.whitespace=nowarn"]
        # A source inside another repository (a build folder, say): without the ceiling git would find that
        # one, and skip every path of the patch without a word.
        env = clean_env({"GIT_CEILING_DIRECTORIES": str(source.resolve().parent)})
        done = subprocess.run(
            [*argv, "apply", *options, os.fspath(self.file.resolve())],
            cwd=source,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        return "" if done.returncode == 0 else done.stderr.strip() or f"git apply failed ({done.returncode})"


def read(file: Path) -> DeepGemmPatch:
    """Read a patch file.

    Raises:
        CheckFailed: it lacks the line that says what it applies to.
    """
    found = _APPLIES_TO.search(file.read_text(encoding="utf-8"))
    if found is None or (found["kind"] == "pypi") != bool(found["sha256"]):
        raise CheckFailed(
            f"{file}: no line `Applies-To: git URL COMMIT` or `Applies-To: pypi PROJECT VERSION SHA256`",
            fix="add it above the first diff",
        )
    return DeepGemmPatch(file, found["kind"], found["what"], found["id"], found["sha256"] or "")


def patch_of(ws: Workspace, pin: Pin) -> DeepGemmPatch:
    """Return the patch of a line.

    Raises:
        UsageError: the line has none.
        IntegrityError: it belongs to another commit than the line's pin.
    """
    file = ws.root / "patches" / FOLDER / f"{pin.line}.patch"
    if not file.is_file():
        raise UsageError(
            f"line {pin.line} has no patches/{FOLDER}/{file.name}", fix="leave DeepGEMM as it is"
        )
    patch = read(file)
    if (patch.kind, patch.what, patch.id) != ("git", url(pin), pin.deepgemm_commit):
        raise IntegrityError(
            f"patches/{FOLDER}/{file.name} is for {patch.what} {patch.id}, but line {pin.line} pins "
            f"{url(pin)} {pin.deepgemm_commit}",
            fix="make the patch anew for the pinned commit and correct its Applies-To line",
        )
    return patch


def reference(ws: Workspace) -> DeepGemmPatch:
    """Return the patch of the source that the package index has: compiled in the tests, never in a wheel."""
    (file,) = sorted((ws.root / "patches" / FOLDER).glob("deepinfer-gemm-*.patch"))
    return read(file)


def url(pin: Pin) -> str:
    return f"https://github.com/{pin.deepgemm_repository}.git"


def check_copies(ws: Workspace) -> None:
    """Prove that the patches in the overlay, which cmake reads, are those of ``patches/deepgemm``.

    Raises:
        CheckFailed: names the first that differs.
    """
    for copy in sorted((ws.overlay / OVERLAY).glob("*.patch")):
        original = ws.root / "patches" / FOLDER / copy.name
        if not original.is_file() or original.read_bytes() != copy.read_bytes():
            raise CheckFailed(
                f"overlay/{OVERLAY}/{copy.name} is not patches/{FOLDER}/{copy.name}",
                fix=f"cp patches/{FOLDER}/{copy.name} overlay/{OVERLAY}/",
            )
