"""What users get wrong: a clear error, the right exit code, nothing lost."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from rebase_lab import FILES, Lab
from test_session import CLASH, IDX, MERGE, OFFSET, make


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("rebase",), 2, "needs a line and a release"),
        (("rebase", "1.0.0"), 2, "needs a line and a release"),
        (("rebase", "2.0.0", "--to", "1.0.0"), 2, "unknown line '2.0.0'"),
        (("rebase", "1.0.0", "--to", "9.9.9"), 2, "no vLLM 9.9.9 (newest: "),
        (("rebase", "1.0.0", "--to", "main"), 2, "not a release"),
        (("rebase", "1.0.0", "--to", "1.0.0"), 2, "is on 1.0.0 already"),
        (("rebase", "1.0.0", "--to", "1.1.0"), 2, "was yanked (broken)"),
        (("rebase", "1.0.0", "--to", "1.2.0"), 2, "has no sdist"),
        (("rebase", "1.0.0", "--to", "1.3.0"), 2, "no x86_64 or aarch64 wheel"),
        (("rebase", "1.0.0", "--to", "1.4.0", "--accept", "x.patch"), 2, "name one of: hook.patch"),
        (("rebase", "1.0.0", "--to", "1.4.0", "--accept", "hook.patch", "--drop", "hook.patch"), 2, "both"),
        (("rebase", "--continue"), 2, "no rebase is in progress"),
        (("rebase", "--abort"), 2, "no rebase is in progress"),
        (("rebase", "--continue", "--to", "1.4.0"), 2, "no rebase to 1.4.0 is in progress"),
        (("rebase", "--continue", "--abort"), 2, "exclude each other"),
        (("rebase", "1.0.0", "--to", "main", "--git", "nowhere"), 2, "cannot read"),
        (("review", "HEAD"), 2, "not a range"),
        (("bisect", "1.0.0"), 2, "needs a command"),
        (("bisect", "1.0.0", "--", "no-such-command"), 2, "cannot run no-such-command"),
        (("canary", "3.0.0"), 2, "unknown line"),
    ],
)
def test_refused(bad: Lab, args: tuple[str, ...], code: int, said: str) -> None:
    before = bad.snapshot("1.0.0")
    done = bad.run(*args)
    assert (done.code, said in done.err, "fix: " in done.err) == (code, True, True), done
    assert bad.snapshot("1.0.0") == before
    assert sorted(path.name for path in (bad.root / "patches").iterdir()) == ["1.0.0"]
    assert sorted(path.name for path in (bad.root / "pins").iterdir()) == ["1.0.0.toml"]
    assert not (bad.root / "build").exists() or not list((bad.root / "build").glob("*.rebase"))


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """One line, and releases that each lack something."""
    from rebase_lab import Index, new_lab, serve

    index = Index()
    serve(index)
    lab = make(new_lab(tmp_path_factory.mktemp("bad"), index))
    index.publish("1.1.0", FILES, yanked="broken")
    index.publish("1.2.0", FILES, source=False)
    index.publish("1.3.0", FILES, wheel=False)
    index.publish("1.4.0", MERGE)
    return lab


def test_without_a_wheel_the_report_still_works(bad: Lab) -> None:
    assert bad.run("rebase", "1.0.0", "--to", "1.3.0", "--report").code == 0


def test_started_twice(lab: Lab) -> None:
    make(lab).index.publish("1.1.0", CLASH)
    assert lab.run("rebase", "1.0.0", "--to", "1.1.0").code == 3
    (lab.tree("1.1.0") / IDX).write_text("work of a person\n")
    state = (lab.root / ".work/rebase/1.1.0.json").read_bytes()
    again = lab.run("rebase", "1.0.0", "--to", "1.1.0")
    assert again.code == 3 and "in progress already" in again.err and "--continue --to 1.1.0" in again.err
    assert (lab.tree("1.1.0") / IDX).read_text() == "work of a person\n"
    assert (lab.root / ".work/rebase/1.1.0.json").read_bytes() == state


def test_two_processes_at_once(lab: Lab) -> None:
    """The second says at once that another run is at work; the first ends as if it were alone."""
    make(lab).index.publish("1.1.0", OFFSET)
    argv = lab.argv("rebase", "1.0.0", "--to", "1.1.0")
    first = subprocess.Popen(argv, cwd=lab.root, env=lab.env, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    second = subprocess.Popen(argv, cwd=lab.root, env=lab.env, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    said = [child.communicate()[1].decode() for child in (first, second)]
    codes = sorted([first.returncode, second.returncode])
    assert codes[0] == 0 and codes[1] in {2, 3}, (codes, said)
    lab.ok("verify", "1.1.0")


@pytest.mark.parametrize("committed", [False, True])
def test_unexported_work(lab: Lab, committed: bool) -> None:
    make(lab).index.publish("1.1.0", OFFSET)
    lab.ok("apply", "1.0.0")
    tree = lab.root / "build/1.0.0"
    (tree / "README.md").write_text("mine\n")
    if committed:
        git = ["git", "-C", str(tree), "-c", "user.name=Me", "-c", "user.email=me@example.org"]
        subprocess.run([*git, "commit", "-q", "-a", "-m", "my change"], check=True)
    done = lab.run("rebase", "1.0.0", "--to", "1.1.0")
    assert done.code == 5 and "series export 1.0.0" in done.err
    assert ("my change" if committed else "README.md") in done.err
    assert (tree / "README.md").read_text() == "mine\n" and not (lab.root / "patches/1.1.0").exists()
    assert lab.run("rebase", "1.0.0", "--to", "1.1.0", "--report").code == 0  # a report leaves nothing behind


def test_a_tree_without_a_state_is_not_overwritten(lab: Lab) -> None:
    make(lab).index.publish("1.1.0", OFFSET)
    lab.tree("1.1.0").mkdir(parents=True)
    (lab.tree("1.1.0") / "file").write_text("mine\n")
    done = lab.run("rebase", "1.0.0", "--to", "1.1.0")
    assert done.code == 5 and (lab.tree("1.1.0") / "file").read_text() == "mine\n"


def test_patches_that_change_under_a_rebase(lab: Lab) -> None:
    make(lab).index.publish("1.1.0", CLASH)
    lab.run("rebase", "1.0.0", "--to", "1.1.0")
    path = lab.root / "patches/1.0.0/wide.patch"
    old = path.read_bytes()
    path.write_bytes(old.replace(b"WIDE = 16", b"WIDE = 32"))
    done = lab.run("rebase", "--continue", "--drop", "hook.patch")
    assert done.code == 1 and "changed since the rebase" in done.err
    path.write_bytes(old)
    lab.ok("rebase", "--continue", "--drop", "hook.patch")


def test_a_damaged_state_can_be_given_up(lab: Lab) -> None:
    make(lab).index.publish("1.1.0", CLASH)
    lab.run("rebase", "1.0.0", "--to", "1.1.0")
    (lab.root / ".work/rebase/1.1.0.json").write_text('{"schema": 99}')
    done = lab.run("rebase", "--continue")
    assert done.code == 1 and "not readable" in done.err and "--abort" in done.err
    lab.ok("rebase", "--abort")
    assert lab.run("rebase", "1.0.0", "--to", "1.1.0").code == 3


def test_a_tree_that_was_removed_by_hand(lab: Lab) -> None:
    import shutil

    make(lab).index.publish("1.1.0", CLASH)
    lab.run("rebase", "1.0.0", "--to", "1.1.0")
    shutil.rmtree(lab.tree("1.1.0"))
    done = lab.run("rebase", "--continue")
    assert done.code == 1 and "is gone" in done.err
    lab.ok("rebase", "--abort")


def test_a_hostile_git_config_changes_nothing(lab: Lab, tmp_path: Path) -> None:
    make(lab).index.publish("1.1.0", MERGE)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        "[diff]\n noprefix = true\n context = 0\n renames = copies\n[apply]\n whitespace = fix\n"
        "[am]\n threeWay = false\n[merge]\n conflictStyle = zdiff3\n[rerere]\n enabled = true\n"
        "[commit]\n gpgSign = true\n[core]\n autocrlf = true\n"
    )
    lab.env["HOME"] = str(home)
    lab.ok("rebase", "1.0.0", "--to", "1.1.0", "--accept", "hook.patch")
    del lab.env["HOME"]
    first = lab.snapshot("1.1.0")
    import shutil

    shutil.rmtree(lab.root / "patches/1.1.0")
    (lab.root / "pins/1.1.0.toml").unlink()
    lab.ok("rebase", "1.0.0", "--to", "1.1.0", "--accept", "hook.patch")
    assert lab.snapshot("1.1.0") == first
