"""The hermetic git runner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_series.errors import UsageError
from vllm_series.git import Git, GitError, clean_env, require_git


def test_environment_of_the_user_does_not_reach_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "/bin/false")
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-01-01T00:00:00")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "diff.noprefix")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
    git = Git(tmp_path)
    git.run("init", "-q", ".")
    (tmp_path / "a").write_text("1\n")
    git.run("add", "a")
    git.run("commit", "-q", "-m", "one")
    assert git.out("log", "-1", "--format=%an %ae %at %ct") == (
        "vllm-series authors series@example.invalid 1577836800 1577836800"
    )
    (tmp_path / "a").write_text("2\n")
    assert "diff --git a/a b/a" in git.out("diff")


def test_network_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    monkeypatch.setenv("GIT_SSL_CAINFO", "/ca.pem")
    env = clean_env()
    assert env["HTTPS_PROXY"] == "http://proxy:1"
    assert env["GIT_SSL_CAINFO"] == "/ca.pem"


def test_missing_git_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="git is not installed") as err:
        require_git()
    assert "apt-get install git" in err.value.fix


def test_old_git_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "git"
    fake.write_text("#!/bin/sh\necho git version 2.25.1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UsageError, match=r"too old: git version 2\.25\.1"):
        require_git()


def test_failure_carries_what_git_said(tmp_path: Path) -> None:
    Git(tmp_path).run("init", "-q", ".")
    with pytest.raises(GitError, match="nothere"):
        Git(tmp_path).run("rev-parse", "--verify", "nothere")
    assert Git(tmp_path).commit_of("nothere") is None
