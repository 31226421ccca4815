"""What is killed in the kill tests: a command, the checkout that it starts from, and what must hold when it
has been run again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from core_lab import Project, message


@dataclass(frozen=True)
class Scene:
    """``check`` raises AssertionError if the checkout is not as an undisturbed run leaves it."""

    argv: tuple[str, ...]
    check: Callable[[], None]


def litter(project: Project) -> list[str]:
    """Return what a run should have removed: temporary files and folders, locks of git, half-made trees."""
    odd = re.compile(
        r"(^|/)(tmp[_.][^/]*|\.[^/]*\.(tmp|part|new)|[^/]*\.new-[^/]*|(index|clone)-[^/]*|[^/]*(\.git|refs|heads"
        r"|HEAD|index|packed-refs|config)[^/]*\.lock|scratch/[^/]+)$"
    )
    # A loose object that is being written may belong to a run that is alive: it goes when it is a day old. In
    # the tree's own repository a person's git may be writing a pack; `git gc` there removes what was left.
    fine = re.compile(r"^\.work/line-|/objects/[0-9a-f]{2}/tmp_obj_|^build/.*/\.git/objects/pack/tmp_")
    paths = [path.relative_to(project.root).as_posix() for path in project.root.rglob("*")]
    return sorted(path for path in paths if odd.search(path) and not fine.search(path))


def _sound(project: Project, want: str, state: str = "APPLIED") -> Callable[[], None]:
    def check() -> None:
        assert project.state() == state
        assert project.head_tree() == want
        assert project.git("status", "--porcelain") == ""
        assert project.git("fsck", "--strict", "--no-dangling") == ""
        assert litter(project) == []
        assert not list((project.ws.odb / "worktrees").glob("*"))

    return check


def first_apply(two: Project) -> Scene:
    """Nothing is there but the fetched sdist: store, import, patches, overlay, tree."""
    want = two.head_tree()
    shutil.rmtree(two.root / "build")
    shutil.rmtree(two.root / ".work")
    return Scene(("apply", two.line), _sound(two, want))


def move(two: Project) -> Scene:
    """Patches and overlay changed on disk: an applied tree is brought up to date."""
    (two.root / "overlay/vllm/dsa/extra.py").write_text("extra = 1\n")
    (two.root / "overlay/vllm/dsa/__init__.py").write_text("NAME = 'other'\n")
    patch = two.patches / "change-backward.patch"
    patch.write_bytes(patch.read_bytes().replace(b"y = x - 2", b"y = x - 7"))
    two.series("lock")
    saved = two.root.parent / "before-the-move"
    shutil.copytree(two.root, saved, symlinks=True)
    two.apply()
    want = two.head_tree()
    shutil.rmtree(two.root)
    shutil.move(saved, two.root)
    return Scene(("apply", two.line), _sound(two, want))


def export(two: Project) -> Scene:
    """A fixup, a new patch and an overlay file go back to patches/ and overlay/."""
    two.edit("vllm/envs.py", "y = x + 2", "y = x + 3")
    two.commit("fixup! Change forward")
    two.edit("vllm/envs.py", "size = 1", "size = 2")
    two.commit(message("Change size", "vllm/envs.py::Config.size"))
    (two.tree / "vllm/dsa/more.py").write_text("more = 1\n")
    two.commit("overlay: more")
    sound = _sound(two, two.head_tree())

    def check() -> None:
        sound()
        names = [row for row in (two.patches / "series").read_text().splitlines() if row[0] != "#"]
        assert names == ["change-forward.patch", "change-backward.patch", "change-size.patch"]
        assert (two.root / "overlay/vllm/dsa/more.py").read_text() == "more = 1\n"
        two.series("verify")

    return Scene(("export", two.line), check)


def discard(two: Project) -> Scene:
    """Commits and changes that are not exported are saved under a ref and overwritten."""
    want = two.head_tree()
    two.edit("vllm/envs.py", "y = x + 2", "y = x + 4")
    two.commit("mine")
    two.edit("vllm/envs.py", "size = 1", "size = 3")
    sound = _sound(two, want)

    def check() -> None:
        sound()
        kept = [two.git("show", f"{ref}:vllm/envs.py") for ref in two.git(
            "for-each-ref", "--format=%(refname)", "refs/series/saved").split()]  # fmt: skip
        assert any("y = x + 4" in text and "size = 3" in text for text in kept)

    return Scene(("apply", two.line, "--discard"), check)


SCENES: dict[str, Callable[[Project], Scene]] = {
    "first_apply": first_apply,
    "move": move,
    "export": export,
    "discard": discard,
}
