"""A user's git config, attributes, hooks and environment change nothing in what the tool makes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from core_lab import Project, message

CONFIG = """
[core]
    autocrlf = true
    eol = crlf
    hooksPath = {home}/hooks
    attributesFile = {home}/attributes
    excludesFile = {home}/excludes
    abbrev = 5
    quotePath = true
    commentChar = C
    whitespace = error-all
    fileMode = false
[commit]
    gpgSign = true
    template = {home}/attributes
    cleanup = strip
[tag]
    gpgSign = true
[gpg]
    program = /bin/false
[user]
    name = Mallory
    email = m@x
    signingKey = none
[diff]
    noprefix = true
    mnemonicPrefix = true
    renames = copies
    algorithm = patience
    context = 0
    interHunkContext = 9
    external = /bin/false
    indentHeuristic = false
    orderFile = {home}/attributes
    suppressBlankEmpty = true
    relative = true
[format]
    signOff = true
    signature = hostile
    attach = true
    numbered = true
    subjectPrefix = HOSTILE
    headers = "X-Hostile: yes"
    to = someone@x
    coverLetter = true
    suffix = .txt
    pretty = oneline
    outputDirectory = {home}/out
    useAutoBase = true
    notes = *
    from = true
    encodeEmailHeaders = true
[am]
    threeWay = true
    keepcr = false
[apply]
    whitespace = fix
    ignoreWhitespace = change
[mailinfo]
    scissors = true
[merge]
    conflictStyle = zdiff3
[rebase]
    autoSquash = false
    autoStash = true
    updateRefs = true
    missingCommitsCheck = error
[sequence]
    editor = /bin/false
[init]
    defaultBranch = hostile
    templateDir = {home}/template
[url "https://127.0.0.1:9/"]
    insteadOf = /
[fetch]
    prune = true
    fsckObjects = true
[transfer]
    fsckObjects = true
[clone]
    defaultRemoteName = hostile
[checkout]
    defaultRemote = hostile
[gc]
    auto = 1
[trailer]
    separators = "#"
[color]
    ui = always
[i18n]
    commitEncoding = ISO-8859-1
    logOutputEncoding = ISO-8859-1
[log]
    showSignature = true
[status]
    showUntrackedFiles = no
[submodule]
    recurse = true
[index]
    threads = 1
[extensions]
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder and an environment that would break every git command that reads them."""
    home = tmp_path / "hostile"
    for folder in ("hooks", "template/hooks", ".config/git"):
        (home / folder).mkdir(parents=True)
    hooks = "pre-commit commit-msg applypatch-msg pre-applypatch post-checkout post-commit pre-rebase"
    for hook in [*hooks.split(), "reference-transaction", "post-index-change", "post-rewrite"]:
        for folder in (home / "hooks", home / "template/hooks"):
            (folder / hook).write_text("#!/bin/sh\nexit 1\n")
            (folder / hook).chmod(0o755)
    (home / "attributes").write_text("* text eol=crlf ident\n*.py diff=hostile export-subst\n")
    (home / "excludes").write_text("*\n")
    for target in (home / ".gitconfig", home / ".config/git/config"):
        target.write_text(CONFIG.format(home=home))
    shutil.copy(home / "attributes", home / ".config/git/attributes")
    shutil.copy(home / "excludes", home / ".config/git/ignore")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    for name, value in {
        "GIT_DIR": "/nonexistent",
        "GIT_WORK_TREE": "/nonexistent",
        "GIT_INDEX_FILE": "/nonexistent",
        "GIT_OBJECT_DIRECTORY": "/nonexistent",
        "GIT_EXTERNAL_DIFF": "/bin/false",
        "GIT_EDITOR": "/bin/false",
        "GIT_COMMITTER_DATE": "2001-01-01T00:00:00",
        "GIT_AUTHOR_NAME": "Mallory",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.autocrlf",
        "GIT_CONFIG_VALUE_0": "true",
        "GIT_DIFF_OPTS": "-u0",
        "LC_ALL": "de_DE.UTF-8",
        "LANG": "de_DE.UTF-8",
        "TZ": "Asia/Tokyo",
    }.items():
        monkeypatch.setenv(name, value)
    return home


def test_everything_gives_the_same_bytes(two: Project, hostile: Path) -> None:
    head = (two.tree / ".git/refs/heads/series/0.9.0").read_text().strip()
    before = two.snapshot()
    shutil.rmtree(two.root / "build")
    shutil.rmtree(two.root / ".work")
    two.series("fetch", "0.9.0")
    two.apply()
    assert (two.tree / ".git/refs/heads/series/0.9.0").read_text().strip() == head
    assert (two.tree / "vllm/crlf.txt").read_bytes() == b"one\r\ntwo\r\n"
    assert b"\r" not in (two.tree / "vllm/envs.py").read_bytes()
    assert not (two.tree / ".git/hooks").exists()
    assert two.state() == "APPLIED"
    two.series("export", "0.9.0")
    two.series("lock")
    assert two.snapshot() == before
    two.series("verify")


def test_export_of_new_work_gives_the_same_bytes(
    two: Project, hostile: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same commits, exported with and without the hostile surroundings."""
    with monkeypatch.context() as calm:
        for name in [name for name in os.environ if name.startswith("GIT_")]:
            calm.delenv(name)
        calm.setenv("HOME", str(tmp_path / "home"))
        calm.setenv("XDG_CONFIG_HOME", str(tmp_path / "home/.config"))
        two.edit("vllm/envs.py", "y = x + 2", "y = x + 3")
        two.commit("fixup! Change forward")
        two.git("mv", "vllm/layers.py", "vllm/layer.py")
        two.commit(message("Möve a file", "vllm/layer.py::"))
        copy = tmp_path / "copy"
        shutil.copytree(two.root, copy, symlinks=True)
        other = Project(copy, two.files)
        other.series("export", "0.9.0")
    two.series("export", "0.9.0")
    assert two.snapshot() == other.snapshot()
    assert "m-ve-a-file.patch" in (two.patches / "series").read_text()


def test_config_and_hooks_of_the_tree_itself(two: Project, hostile: Path) -> None:
    """The user's own settings in build/<line>/.git do not reach the tool either."""
    before = two.snapshot()
    git_dir = two.tree / ".git"
    shutil.copytree(hostile / "hooks", git_dir / "hooks")
    with (git_dir / "config").open("a") as out:
        out.write(CONFIG.format(home=hostile))
    (git_dir / "info").mkdir(exist_ok=True)
    (git_dir / "info/attributes").write_text("")
    assert two.state() == "APPLIED"
    two.series("export", "0.9.0")
    assert two.snapshot() == before
    (two.root / "overlay/vllm/dsa/more.py").write_text("more = 1\n")
    two.apply()
    assert (two.tree / "vllm/dsa/more.py").read_bytes() == b"more = 1\n"
    assert two.state() == "APPLIED"
