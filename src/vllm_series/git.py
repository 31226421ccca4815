"""Runs git so that the result depends on its input alone: no user or system config, fixed dates, no hooks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_series import lock_file
from vllm_series.errors import CheckFailed, FetchFailed, UsageError

IDENT_NAME = "vllm-series authors"
IDENT_EMAIL = "series@example.invalid"
FIXED_DATE = "1577836800 +0000"  # 2020-01-01: any constant does, it only has to stay the same
MIN_VERSION = (2, 34)  # GIT_CONFIG_GLOBAL (2.32), `am --empty` and `--quoted-cr` (2.34)

# Given with -c, so they also win over the config of the repository that git runs in.
_CONFIG = {
    "am.keepcr": "true",
    "am.messageId": "false",
    "am.threeWay": "false",
    "apply.ignoreWhitespace": "no",
    "apply.whitespace": "nowarn",
    "advice.detachedHead": "false",
    "commit.gpgSign": "false",
    "commit.cleanup": "whitespace",
    "commit.status": "false",
    "core.abbrev": "12",
    "core.attributesFile": "/dev/null",
    "core.autocrlf": "false",
    "core.compression": "1",
    "core.eol": "lf",
    "core.excludesFile": "/dev/null",
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.quotePath": "false",
    "core.safecrlf": "false",
    "core.symlinks": "true",
    "core.whitespace": "",
    "diff.algorithm": "myers",
    "diff.colorMoved": "no",
    "diff.context": "3",
    "diff.ignoreSubmodules": "none",
    "diff.indentHeuristic": "true",
    "diff.interHunkContext": "0",
    "diff.mnemonicPrefix": "false",
    "diff.noprefix": "false",
    "diff.orderFile": "/dev/null",
    "diff.relative": "false",
    "diff.renames": "false",
    "diff.suppressBlankEmpty": "false",
    "fetch.fsckObjects": "false",
    "gc.auto": "0",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "init.defaultBranch": "series",
    "init.defaultObjectFormat": "sha1",
    "init.defaultRefFormat": "files",
    "mailinfo.scissors": "false",
    "maintenance.auto": "false",
    "rebase.abbreviateCommands": "false",
    "rebase.updateRefs": "false",
    "rerere.enabled": "false",
    "safe.directory": "*",
    "sequence.editor": ":",
    "submodule.recurse": "false",
    "tag.gpgSign": "false",
    "uploadpack.allowAnySHA1InWant": "true",
}
_DROP_FROM_ENV = re.compile(r"^(GIT_.*|LC_.*|LANG|LANGUAGE|TZ|EMAIL|VISUAL|EDITOR|PAGER|LESS)$")
_KEEP_IN_ENV = {
    "GIT_SSL_CAINFO",
    "GIT_SSL_NO_VERIFY",
    "GIT_SSH",
    "GIT_SSH_COMMAND",
    "GIT_ASKPASS",
    "GIT_PROXY_COMMAND",
}


class GitError(CheckFailed):
    """A git command failed; ``stderr`` is what it said."""

    def __init__(self, args: Iterable[str], code: int, stderr: str) -> None:
        self.stderr = stderr.strip()
        super().__init__(f"git {' '.join(args)} failed ({code}): {self.stderr}")


def raise_if_disk_full(said: str, folder: Path) -> None:
    """Raise when git failed for want of space; ``said`` is its stderr.

    git names the cause in several ways, and while it checks files out not at all: then the free space tells.

    Raises:
        FetchFailed: the disk that holds ``folder`` is full.
    """
    named = re.search(r"No space left|Out of diskspace|Disk quota exceeded|File too large", said)
    if named or ("unable to write" in said and shutil.disk_usage(folder).free < 4 << 20):
        raise FetchFailed(
            f"no space left in {folder}", fix="free some space, then run the command again; nothing is lost"
        )


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which git reads nothing of the user: no config, identity, hooks, dates,
    locale."""
    env = {k: v for k, v in os.environ.items() if k in _KEEP_IN_ENV or not _DROP_FROM_ENV.match(k)}
    env.update(
        GIT_CONFIG_GLOBAL="/dev/null",
        GIT_CONFIG_NOSYSTEM="1",
        GIT_ATTR_NOSYSTEM="1",
        GIT_OPTIONAL_LOCKS="0",  # `git status` killed while it stores what it saw would leave index.lock
        GIT_TERMINAL_PROMPT="0",
        GIT_EDITOR=":",
        GIT_PAGER="cat",
        GIT_AUTHOR_NAME=IDENT_NAME,
        GIT_AUTHOR_EMAIL=IDENT_EMAIL,
        GIT_AUTHOR_DATE=FIXED_DATE,
        GIT_COMMITTER_NAME=IDENT_NAME,
        GIT_COMMITTER_EMAIL=IDENT_EMAIL,
        GIT_COMMITTER_DATE=FIXED_DATE,
        GIT_NO_REPLACE_OBJECTS="1",
        LC_ALL="C",
        TZ="UTC",
    )
    env.update(extra or {})
    return env


def require_git() -> str:
    """Return git's path.

    Raises:
        UsageError: git is missing or older than ``MIN_VERSION``.
    """
    wanted = ".".join(map(str, MIN_VERSION))
    path = shutil.which("git")
    if path is None:
        raise UsageError(f"git is not installed (need {wanted} or newer)", fix="sudo apt-get install git")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, env=clean_env()).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    if not found or (int(found[1]), int(found[2])) < MIN_VERSION:
        raise UsageError(
            f"git is too old: {said.strip() or 'unknown version'} (need {wanted} or newer)",
            fix="install a newer git, for example from your distribution's backports",
        )
    return path


@dataclass(frozen=True)
class Git:
    """git in one folder: a bare repository or a work tree.

    ``env`` adds to the hermetic environment (for example ``GIT_INDEX_FILE``), ``config`` to its settings.
    """

    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)

    def argv(self, *args: str) -> list[str]:
        settings = {**_CONFIG, **self.config}
        return ["git", *(part for k, v in settings.items() for part in ("-c", f"{k}={v}")), *args]

    def run(
        self, *args: str, data: bytes | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        """Run git with ``data`` on its stdin (default: nothing) and return bytes.

        Raises:
            GitError: it failed and ``check`` is set.
            FetchFailed: it failed because the disk is full.
            UsageError: git is not installed.
        """
        try:
            done = subprocess.run(
                self.argv(*args),
                cwd=self.cwd,
                env=clean_env(self.env),
                input=data if data is not None else b"",
                capture_output=True,
                pass_fds=lock_file.held(),
            )
        except FileNotFoundError:
            require_git()  # names the mend when git is what is missing
            raise
        if check and done.returncode != 0:
            said = (done.stderr or done.stdout).decode("utf-8", "replace")
            raise_if_disk_full(said, self.cwd)
            raise GitError(args, done.returncode, said)
        return done

    def out(self, *args: str, data: bytes | None = None) -> str:
        """Run git and return its stdout as text without the last newline."""
        return self.run(*args, data=data).stdout.decode("utf-8", "surrogateescape").rstrip("\n")

    def set_ref(self, ref: str, value: str, *, message: str = "") -> None:
        """Set a ref that only this tool writes; the caller holds the lock that guards it. ``message`` goes
        into the reflog.

        A ``.lock`` beside it is then what a killed git left, and would stop every later run.
        """
        self.drop_ref_lock(ref)
        self.run("update-ref", *(("-m", message) if message else ()), ref, value)

    def clear_ref(self, ref: str) -> None:
        """Let a ref that names a blob name an empty one, on the conditions of ``set_ref``.

        To delete it git would lock all packed refs, and killed then it would stop whoever deletes or packs
        a ref here.
        """
        self.set_ref(ref, self.out("hash-object", "-w", "--stdin", data=b""))

    def fetch_ref(self, source: Path, name: str, ref: str) -> None:
        """Fetch ``name`` of another repository on this machine into a ref, on the conditions of
        ``set_ref``."""
        self.drop_ref_lock(ref)
        self.run("fetch", "-q", "--no-tags", "--no-write-fetch-head", str(source), f"+{name}:{ref}")

    def drop_ref_lock(self, ref: str) -> None:
        """Remove the lock of a ref that a killed git left, on the conditions of ``set_ref``."""
        own = self.cwd / ".git"
        folder = own if own.is_dir() else self.cwd
        (folder / f"{ref}.lock").unlink(missing_ok=True)

    def raw(self, *args: str, data: bytes | None = None) -> bytes:
        return self.run(*args, data=data).stdout

    def ok(self, *args: str) -> bool:
        return self.run(*args, check=False).returncode == 0

    def lines(self, *args: str, data: bytes | None = None) -> list[str]:
        return self.out(*args, data=data).splitlines()

    def paths(self, *args: str) -> list[str]:
        """Run a command that was told ``-z`` and return the NUL-separated fields."""
        text = self.run(*args).stdout.decode("utf-8", "surrogateescape")
        return [part for part in text.split("\0") if part]

    def commit_of(self, name: str) -> str | None:
        """Return the full commit id of ``name``, or None if there is no such commit."""
        done = self.run(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}", check=False
        )
        return done.stdout.decode().strip() or None

    def tree_of(self, name: str) -> str:
        return self.out("rev-parse", "--verify", f"{name}^{{tree}}")

    def blob(self, treeish: str, path: str) -> bytes | None:
        """Return the bytes of one file in a tree, or None if it is not there."""
        done = self.run("cat-file", "blob", f"{treeish}:{path}", check=False)
        return done.stdout if done.returncode == 0 else None

    def files(self, treeish: str, *under: str) -> dict[str, tuple[str, str]]:
        """Return ``{path: (mode, blob id)}`` of a tree, limited to the paths ``under``."""
        found: dict[str, tuple[str, str]] = {}
        for row in self.paths("ls-tree", "-r", "-z", "--full-tree", treeish, "--", *under):
            meta, path = row.split("\t", 1)
            mode, _kind, blob = meta.split(" ")
            found[path] = (mode, blob)
        return found

    def changed(self, old: str, new: str) -> dict[str, str]:
        """Return ``{path: status letter}`` of what differs between two trees, without rename detection."""
        row = self.paths(
            "diff-tree", "-r", "-z", "--no-renames", "--name-status", f"{old}^{{tree}}", f"{new}^{{tree}}"
        )
        return dict(zip(row[1::2], row[0::2], strict=True))

    def with_env(self, **env: str) -> Git:
        return Git(self.cwd, {**self.env, **env}, self.config)

    def with_config(self, **config: str) -> Git:
        """``with_config(core_sparseCheckout="true")``: the first underscore stands for the dot."""
        added = {k.replace("_", ".", 1): v for k, v in config.items()}
        return Git(self.cwd, self.env, {**self.config, **added})
