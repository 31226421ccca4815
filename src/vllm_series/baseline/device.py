"""Runs upstream's tests on a GPU machine that has no network, no git and none of this project's packages.

    python -m vllm_series.baseline.device --kit KIT --out OUT [--jobs 8] [--budget 180]

It needs the standard library, pytest from the kit, and a vLLM of the line that can be imported, upstream's or
ours: hard-linked copies of its ``vllm`` package become the pristine and the patched tree, each with the kit's
files laid over it.
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
from vllm_series.baseline.workers import ForkPool, FreshPool, Pool
from vllm_series.errors import CheckFailed

KERNELS = "vllm/_dsa_C.so"
RERUNS = 0.15  # of the time is kept for running again what differs
NOT_YET = "the time budget of the machine was used up"


def lay(kit: Path, place: Path, *, patched: bool) -> Path:
    """Make a tree with ``vllm/`` and ``tests/``: hard links to the installed package, the kit's files over
    them. Whether upstream's wheel or a patched one is installed makes no difference."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        sys.exit("error: no vllm on PYTHONPATH\n  fix: export PYTHONPATH to the folder that holds it")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(found.submodule_search_locations[0], place / "vllm", copy_function=_link)
    shutil.copytree(kit / "tests", place / "tests", copy_function=_link)
    shutil.copy2(kit / "pyproject.toml", place / "pyproject.toml")
    kernels = place / KERNELS
    keep = kernels.read_bytes() if patched and kernels.is_file() else None
    shutil.rmtree(place / "vllm" / "dsa", ignore_errors=True)
    kernels.unlink(missing_ok=True)
    side = kit / ("patched" if patched else "pristine")
    for name in json.loads((kit / "removed.json").read_text())["patched" if patched else "pristine"]:
        (place / name).unlink(missing_ok=True)
    for source in sorted(side.rglob("*")):
        if source.is_file():
            target = place / source.relative_to(side)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # a hard link: writing into it would change the installed package
            shutil.copy2(source, target)
    if keep is not None and not kernels.exists():
        kernels.write_bytes(keep)
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
    env.update(TRITON_CACHE_DIR=str(scratch / "triton"), PYTHONDONTWRITEBYTECODE="1", SERIES_GPU="1")
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
    prepared: dict[str, tuple[Path, dict[str, str], Path]] = {}
    for mode, env in plan["modes"].items():
        site = sites["pristine" if mode == "upstream" else "patched"]
        scratch = place / "scratch" / _safe(mode)
        whole = environment(args.kit, site, scratch, env)
        prepared[mode] = site, whole, scratch
        machine = machine or {**fingerprint.machine(), **fingerprint.packages(python, whole)}
    pools = _pools(args.isolation, python, prepared)
    machine["isolation"] = "fork" if isinstance(pools["upstream"], ForkPool) else "fresh"
    runners = {
        mode: FileRunner(pools[mode], site, scratch, Limits(args.test_seconds, args.budget))
        for mode, (site, _, scratch) in prepared.items()
    }
    jobs = [(file, mode) for file in plan["files"] for mode in file.get("modes", runners)]
    runs = {
        mode: Run(plan["line"], mode, plan["trees"][mode], dict(env), dict(machine), date=_now())
        for mode, env in plan["modes"].items()
    }
    for file, mode in jobs:  # so that the results of all modes hold the same files whenever the machine goes
        name = str(file["path"])
        runs[mode].files[name] = FileRun(0.0, 0.0, 0, {name: Node("not_run", NOT_YET)})
    stop = end - RERUNS * args.budget

    def one(job: tuple[dict[str, Any], str]) -> tuple[str, str, FileRun]:
        file, mode = job
        name, left = str(file["path"]), stop - time.monotonic()
        if left < 10:
            return name, mode, FileRun(0.0, 0.0, 0, {name: Node("not_run", NOT_YET)})
        runner = runners[mode]
        limits = Limits(args.test_seconds, min(left, float(file["seconds"])), sample=int(file["sample"]))
        done = FileRunner(runner.pool, runner.site, runner.scratch, limits).run(name)
        print(f"{mode:9} {name}: {_short(done)} in {done.seconds:.0f} s", flush=True)
        return name, mode, done

    try:
        with ThreadPoolExecutor(args.jobs) as threads:
            for name, mode, done in threads.map(one, jobs):
                runs[mode].files[name] = done
                # What is there counts, whenever the machine goes.
                runs[mode].save(args.out / f"{_safe(mode)}.json")
        _confirm(plan["line"], runs, runners, end, args)
    finally:
        for pool in pools.values():
            pool.close()
    return 0


Prepared = Mapping[str, tuple[Path, dict[str, str], Path]]  # mode -> site, environment, scratch folder


def _pools(isolation: str, python: Path, prepared: Prepared) -> dict[str, Pool]:
    """Fork from processes that have vLLM imported, if children can use the GPU in every mode; else start an
    interpreter for every file."""
    if isolation != "fresh":
        try:
            with ThreadPoolExecutor(len(prepared)) as threads:
                made = threads.map(lambda one: _fork(python, *one), prepared.values())
                forks = dict(zip(prepared, made, strict=True))
        except CheckFailed as error:
            if isolation == "fork":
                raise
            print(f"{error}; every file gets an interpreter of its own", flush=True)
        else:
            if isolation == "fork" or all(pool.forks for pool in forks.values()):
                return dict(forks)
            for pool in forks.values():
                pool.close()
            print(
                "importing vLLM touches the GPU here; every file gets an interpreter of its own", flush=True
            )
    return {mode: FreshPool(python, site, env) for mode, (site, env, _) in prepared.items()}


def _fork(python: Path, site: Path, env: dict[str, str], scratch: Path) -> ForkPool:
    return ForkPool(python, site, env, scratch / "server.log")


def _confirm(
    line: str,
    runs: Mapping[str, Run],
    runners: Mapping[str, FileRunner],
    end: float,
    args: argparse.Namespace,
) -> None:
    """Run what differs again, three times on both sides, while there is time; writes ``confirmed.json``."""

    def again(mode: str) -> diffing.Again:
        def run(wanted: Mapping[str, list[str]]) -> dict[str, Node] | None:
            left = end - time.monotonic()
            if left < 10:
                return None
            one = runners[mode]
            runner = FileRunner(one.pool, one.site, one.scratch, Limits(args.test_seconds, left))
            found = run_files(runner, wanted, args.jobs, only=wanted)
            return {node: one for file in found.values() for node, one in file.nodes.items()}

        return run

    said = {}
    for mode, run in runs.items():
        if mode == "upstream":
            continue
        found = diffing.compare(runs["upstream"], run, exact=mode == "off", planned=list(run.files))
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
    parser.add_argument("--isolation", choices=["auto", "fork", "fresh"], default="auto")
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
