"""Takes the pinned commit from a git clone instead of the sdist, and proves that both have the same files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vllm_series import importer, scratch, sdist
from vllm_series.errors import FetchFailed, IntegrityError, UsageError
from vllm_series.git import Git
from vllm_series.index import shown
from vllm_series.pins import Pin
from vllm_series.ui import say
from vllm_series.workspace import Workspace


def ref(line: str) -> str:
    return f"refs/heads/clone/{line}"


def base_from(ws: Workspace, pin: Pin, url: str, sources: Iterable[Path] = ()) -> str:
    """Return a commit in the object store with the whole tree of the pinned upstream commit.

    A clone has files that the sdist lacks; every file that both have must have the same bytes. The commit
    has no
    parents: history is not fetched.

    Raises:
        FetchFailed: the clone cannot be read.
        UsageError: it does not have the commit.
        IntegrityError: a file differs from the sdist's.
    """
    imported = importer.import_pin(ws, pin, sources)
    store = importer.odb(ws)
    with scratch.folder(ws, "clone") as tmp:
        git = Git(tmp)
        git.run("init", "-q", "--bare", "--template=", ".")
        commit = _fetch(git, pin, url)
        text = f"vLLM {pin.version} from a clone\n\nCommit: {commit}\n"
        base = git.out("commit-tree", f"{commit}^{{tree}}", "-F", "-", data=text.encode())
        git.run("update-ref", "refs/heads/base", base)
        importer.fetch_ref(ws, tmp, "refs/heads/base", ref(pin.line))
    mine, theirs = store.files(imported), store.files(base)
    wrong = sorted(path for path, (_, blob) in mine.items() if path in theirs and theirs[path][1] != blob)
    if wrong:
        raise IntegrityError(
            f"{_name(url)} at {commit[:12]} differs from the sdist in {len(wrong)} files: "
            f"{', '.join(wrong[:5])}",
            fix="use the upstream repository, or leave --git out to take the sdist",
        )
    both = mine.keys() & theirs.keys()
    if not both:
        raise IntegrityError(f"{_name(url)} has no file of the sdist", fix="use the upstream repository")
    say(
        f"{_name(url)}: commit {commit[:12]}, {len(both)} files as in the sdist, "
        f"{len(theirs) - len(both)} more, {len(mine) - len(both)} only in the sdist"
    )
    return base


def is_clone_of(git: Git, commit: str, pin: Pin) -> bool:
    """Say whether a base commit was made here from a clone of the pinned commit."""
    text = git.out("log", "-1", "--format=%B", commit)
    first, _, rest = text.partition("\n")
    named = rest.strip().removeprefix("Commit: ")
    return first == f"vLLM {pin.version} from a clone" and sdist.same_commit(named, pin.source.commit)


def _fetch(git: Git, pin: Pin, url: str) -> str:
    wanted = pin.source.commit
    listing = git.run("ls-remote", url, check=False)
    if listing.returncode != 0:
        said = listing.stderr.decode("utf-8", "replace").strip().splitlines()
        raise FetchFailed(
            f"cannot read {_name(url)}: {said[-1] if said else 'git ls-remote failed'}",
            fix="check the URL and the network, or leave --git out to take the sdist",
        )
    refs = [row.split("\t") for row in listing.stdout.decode("utf-8", "replace").splitlines()]
    named = next((name.removesuffix("^{}") for commit, name in refs if commit.startswith(wanted)), None)
    if named:
        done = git.run(
            "fetch", "-q", "--no-tags", "--depth=1", url, f"+{named}:refs/wanted/commit", check=False
        )
    else:
        say(f"{_name(url)}: no ref at {wanted}, fetching its branches and tags")
        done = git.run(
            "fetch",
            "-q",
            "--no-tags",
            url,
            "+refs/heads/*:refs/heads/*",
            "+refs/tags/*:refs/tags/*",
            check=False,
        )
    if done.returncode != 0:
        raise FetchFailed(
            f"cannot fetch from {_name(url)}: {done.stderr.decode('utf-8', 'replace').strip()}",
            fix="try again, or leave --git out to take the sdist",
        )
    commit = git.commit_of("refs/wanted/commit" if named else wanted)
    if commit is None or not commit.startswith(wanted):
        raise UsageError(
            f"{_name(url)} does not have the pinned commit {wanted}",
            fix="name a full clone of upstream, or leave --git out to take the sdist",
        )
    return commit


def _name(url: str) -> str:
    return shown(url) if "://" in url else url
