"""Kills apply, export and rebase on the real 0.28.0 tree before changes in the file system drawn by lot.

Not part of the test run: `python tests/core/sweep_real.py --runs 400 --folder /dev/shm/kills` takes hours on
a disk. Each kill is followed by an undisturbed run, which must end as if there had been no kill. What it
finds becomes a test in test_kill_steps.py.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kills import Killer

LINE, NEW = "0.28.0", "0.33.0"
CHECKOUT = Path(__file__).resolve().parents[2]


class Lab:
    """A copy of this checkout's pins, patches and overlay, brought to the start of each scene once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.tree = folder, folder / "root", folder / "root" / "build" / LINE
        self.killer = Killer(folder)

    def series(self, *args: str, code: int | None = 0) -> str:
        argv = [sys.executable, "-m", "vllm_series.cli", "--root", str(self.root), *args]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert code is None or done.returncode == code, f"{args}: exit {done.returncode}\n{done.stderr}"
        return done.stdout

    def git(self, *args: str) -> str:
        own = ("-c", "user.name=U", "-c", "user.email=u@x", "-c", "core.hooksPath=/dev/null")
        return subprocess.check_output(["git", "-C", str(self.tree), *own, *args], text=True).strip()

    def start(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        for name in ("pins", "patches", "overlay"):
            shutil.copytree(CHECKOUT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))

    def applied(self, want: str) -> None:
        status = json.loads(self.series("status", LINE, "--json"))
        assert status["lines"][LINE]["state"] == "APPLIED", status
        assert self.git("rev-parse", "HEAD^{tree}") == want
        assert self.git("status", "--porcelain") == ""
        assert [path.name for path in self.tree.parent.iterdir()] == [LINE]
        left = [*self.root.glob(".work/scratch/*"), *self.root.glob(".work/tmp/*.d")]
        assert not left, left

    def first_apply(self) -> tuple[list[str], Callable[[], None]]:
        self.series("apply", LINE)
        want = self.git("rev-parse", "HEAD^{tree}")
        shutil.rmtree(self.root / "build")
        shutil.rmtree(self.root / ".work")
        return ["apply", LINE], lambda: self.applied(want)

    def move(self) -> tuple[list[str], Callable[[], None]]:
        self.series("apply", LINE)
        want = self.git("rev-parse", "HEAD^{tree}")
        first = next(
            row for row in (self.root / f"patches/{LINE}/series").read_text().split() if "patch" in row
        )
        self.series("apply", LINE, "--before", first)
        return ["apply", LINE], lambda: self.applied(want)

    def export(self) -> tuple[list[str], Callable[[], None]]:
        self.series("apply", LINE)
        for path, text in (("vllm/dsa/kill.py", "x = 1\n"), ("vllm/dsa/more.py", "y = 1\n")):
            (self.tree / path).write_text(text)
            self.git("add", path)
            self.git("commit", "-q", "-m", f"overlay: {path}")
        envs = self.tree / "vllm/envs.py"
        envs.write_text(re.sub(r"(?m)^import os\n", "import os\n# killed\n", envs.read_text(), count=1))
        self.git("commit", "-q", "-a", "-m", f"fixup! {self.git('log', '-1', '--format=%s', self._envs())}")
        want = self.git("rev-parse", "HEAD^{tree}")
        return ["export", LINE], lambda: self.applied(want)

    def _envs(self) -> str:
        return self.git("log", "--format=%H", "-1", f"series/{LINE}~1", "--", "vllm/envs.py")

    def rebase(self) -> tuple[list[str], Callable[[], None]]:
        shutil.rmtree(self.root / "patches" / NEW)
        whole = self._settled(self.series("rebase", LINE, "--to", NEW, code=None))
        shutil.rmtree(self.root / "patches" / NEW, ignore_errors=True)
        shutil.rmtree(self.root / ".work/rebase", ignore_errors=True)
        shutil.rmtree(self.root / f"build/{NEW}.rebase", ignore_errors=True)

        def check() -> None:
            under_way = (self.root / f".work/rebase/{NEW}.json").exists()
            again = ["--continue", "--to", NEW] if under_way else [LINE, "--to", NEW]
            found = self._settled(self.series("rebase", *again, code=None))
            assert found == whole, f"{found} instead of {whole}"

        return ["rebase", LINE, "--to", NEW], check

    def _settled(self, said: str) -> str:
        saved = self.root / f".work/rebase/{NEW}.json"
        if not saved.exists():
            return "".join(p.read_text() for p in sorted((self.root / "patches" / NEW).iterdir())) or said
        rows = json.loads(saved.read_text())
        return json.dumps([rows["phase"], rows["head"], [one["state"] for one in rows["outcomes"]]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    lab, dice, failed = Lab(args.folder), random.Random(args.seed), 0
    scenes = []
    for scene in (lab.first_apply, lab.move, lab.export, lab.rebase):
        lab.start()
        argv, check = scene()
        kept = args.folder / scene.__name__
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(lab.root, kept, symlinks=True)
        scenes.append((kept, argv, check, len(lab.killer.series(lab.root, *argv).steps)))
        print(f"{scene.__name__}: {scenes[-1][3]} steps", flush=True)
    for number in range(args.runs):
        kept, argv, check, steps = scenes[number % len(scenes)]
        # As many kills among the first steps, which take locks, as among the thousands that write files.
        at = round(math.exp(dice.uniform(0, math.log(steps))))
        shutil.rmtree(lab.root)
        shutil.copytree(kept, lab.root, symlinks=True)
        run = lab.killer.series(lab.root, *argv, at=at)
        try:
            if argv[0] != "rebase":
                lab.series(*argv)
            check()
        except AssertionError as err:
            failed += 1
            print(f"FAILED {kept.name} at {at} {run.steps}: {err}", flush=True)
        if number % 20 == 19:
            print(f"{number + 1} kills, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
