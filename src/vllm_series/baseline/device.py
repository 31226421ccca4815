"""Runs upstream's tests on a GPU machine that has no network, no git and none of this project's packages.

    python -m vllm_series.baseline.device --kit KIT --out OUT [--jobs 8] [--budget 180]

It needs the standard library, pytest from the kit, and a vLLM of the line on ``PYTHONPATH``: its ``vllm``
package is taken as upstream's, a hard-linked copy with the kit's changes laid over it as the patched one.
``series baseline gpu-kit`` makes the kit; ``series baseline diff LINE --saved --results OUT`` compares what
comes back.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_series.baseline import diff as diffing
from vllm_series.baseline import fingerprint
from vllm_series.baseline.engine import FileRunner, Limits, run_files
from vllm_series.baseline.outcome import FileRun, Node, Run
from vllm_series.baseline.workers import FreshPool

NOT_YET = "the time budget of the machine was used up"


def lay(kit: Path, place: Path, *, patched: bool) -> Path:
    """Make a tree with ``vllm/`` and ``tests/``: hard links to the installed package, changes over them."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        sys.exit("error: no vllm on PYTHONPATH\n  fix: export PYTHONPATH to the folder that holds it")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(found.submodule_search_locations[0], place / "vllm", copy_function=_link)
    shutil.copytree(kit / "tests", place / "tests", copy_function=_link)
    shutil.copy2(kit / "pyproject.toml", place / "pyproject.toml")
    if not patched:
        return place
    removed = json.loads((kit / "removed.json").read_text())
    for name in removed:
        (place / name).unlink(missing_ok=True)
    for source in sorted((kit / "changed").rglob("*")):
        if source.is_file():
            target = place / source.relative_to(kit / "changed")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # a hard link: writing into it would change the pristine tree
            shutil.copy2(source, target)
    return place


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def environment(kit: Path, site: Path, scratch: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """The machine's environment with the site in front, caches of its own and the network switched off."""
    scratch.mkdir(parents=True, exist_ok=True)
    path = [str(site), str(kit / "packages"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONHASHSEED": "0"}
    env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    env.update(VLLM_CACHE_ROOT=str(scratch / "vllm"), TORCHINDUCTOR_CACHE_DIR=str(scratch / "inductor"))
    env.update(TRITON_CACHE_DIR=str(scratch / "triton"), PYTHONDONTWRITEBYTECODE="1")
    return {**env, **extra}


def main(argv: list[str] | None = None) -> int:
    """Run every mode of the kit's plan side by side; always leaves a result file per mode."""
    args = _arguments(argv)
    plan: dict[str, Any] = json.loads((args.kit / "plan.json").read_text())
    end = time.monotonic() + args.budget
    args.out.mkdir(parents=True, exist_ok=True)
    place = args.work
    sites = {name: lay(args.kit, place / name, patched=name == "patched") for name in ("pristine", "patched")}
    python = Path(sys.executable)
    machine: dict[str, Any] = {}
    runners: dict[str, FileRunner] = {}
    for mode, env in plan["modes"].items():
        site = sites["pristine" if mode == "upstream" else "patched"]
        scratch = place / "scratch" / mode
        whole = environment(args.kit, site, scratch, env)
        machine = machine or {**fingerprint.machine(), **fingerprint.packages(python, whole)}
        limits = Limits(args.test_seconds, args.budget)
        runners[mode] = FileRunner(FreshPool(python, site, whole), site, scratch, limits, {})
    jobs = [(file, mode) for file in plan["files"] for mode in runners]
    runs = {
        mode: Run(plan["line"], mode, plan["trees"][mode], dict(env), dict(machine), date=_now())
        for mode, env in plan["modes"].items()
    }

    def one(job: tuple[str, str]) -> tuple[str, str, FileRun]:
        file, mode = job
        left = end - time.monotonic()
        if left < 10:
            return file, mode, FileRun(0.0, 0.0, 0, {file: Node("not_run", NOT_YET)})
        runner = runners[mode]
        limited = FileRunner(runner.pool, runner.site, runner.scratch, Limits(args.test_seconds, left), {})
        done = limited.run(file)
        print(f"{mode:9} {file}: {_short(done)} in {done.seconds:.0f} s", flush=True)
        return file, mode, done

    with ThreadPoolExecutor(args.jobs) as threads:
        for file, mode, done in threads.map(one, jobs):
            runs[mode].files[file] = done
            runs[mode].save(
                args.out / f"{_safe(mode)}.json"
            )  # what is there counts, whenever the machine goes
    _confirm(plan["line"], runs, runners, end, args)
    return 0


def _confirm(
    line: str,
    runs: Mapping[str, Run],
    runners: Mapping[str, FileRunner],
    end: float,
    args: argparse.Namespace,
) -> None:
    """Run what differs again, three times on both sides, while there is time; writes ``confirmed.json``."""

    def again(mode: str) -> diffing.Again:
        def run(wanted: Mapping[str, list[str]]) -> dict[str, Node]:
            only = {file: nodes for file, nodes in wanted.items() if nodes}
            found = run_files(runners[mode], wanted, args.jobs, only=only or None)
            return {node: one for file in found.values() for node, one in file.nodes.items()}

        return run

    said = {}
    for mode, run in runs.items():
        if mode == "upstream":
            continue
        found = diffing.compare(runs["upstream"], run, exact=mode == "off")
        if found.of(*diffing.DOUBTFUL) and time.monotonic() < end:
            diffing.confirm(found, again("upstream"), again(mode), lambda file: False)
            said[mode] = {row.node: row.again for row in found.rows if row.again}
        print(f"{line} {mode}: {found.counts()}", flush=True)
    (args.out / "confirmed.json").write_text(json.dumps(said, indent=1) + "\n")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="upstream's tests on this machine's GPU")
    parser.add_argument("--kit", type=Path, required=True, help="folder that `series baseline gpu-kit` made")
    parser.add_argument("--out", type=Path, required=True, help="where the results go")
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu-baseline"), help="scratch folder")
    parser.add_argument("--jobs", type=int, default=8, help="test files at a time")
    parser.add_argument("--budget", type=float, default=180, help="seconds for everything")
    parser.add_argument("--test-seconds", type=float, default=60, help="limit of one test")
    return parser.parse_args(argv)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _safe(mode: str) -> str:
    return mode.replace(":", "-").replace("=", "-")


def _short(run: FileRun) -> str:
    counts: dict[str, int] = {}
    for node in run.nodes.values():
        counts[node.outcome] = counts.get(node.outcome, 0) + 1
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) or "no test"


if __name__ == "__main__":
    sys.exit(main())
