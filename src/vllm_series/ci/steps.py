"""The steps of CI, once: Buildkite's pipeline and `ci/local.sh` are both made of them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_series import pins
from vllm_series.errors import CheckFailed, UsageError
from vllm_series.ui import say
from vllm_series.workspace import Workspace

CPU_QUEUE = "default"
UPSTREAM = "upstream's tests, patched against pristine"
UPSTREAM_SHARDS = 4


@dataclass(frozen=True)
class GpuQueue:
    """Agents with cards: their queue tag and what the GPU suite is asked there."""

    tag: str
    label: str
    options: str = ""


GPU_QUEUES = (
    GpuQueue("hopper", "Hopper"),
    GpuQueue("blackwell", "Blackwell"),
    GpuQueue("hopper-x2", "two GPUs", "--min-gpus 2"),
)


@dataclass(frozen=True)
class Step:
    """One step. ``command`` runs in the checkout on a bare agent and needs no Buildkite.

    Attributes:
        key: its name, for `ci/local.sh` and for dependencies.
        group: heading in Buildkite; '' for a step that only a local run has.
        label: what it does, for people.
        queue: agents' queue tag.
        minutes: limit, generous.
        needs: keys of the steps whose artifacts it takes.
        artifacts: globs that Buildkite uploads.
        shards: jobs that share the work.
        condition: Buildkite's ``if``.
        soft_exit: exit code that marks the step without failing the build.
        after_failures: runs whatever became of ``needs``.
    """

    key: str
    group: str
    label: str
    command: str
    queue: str = CPU_QUEUE
    minutes: int = 30
    needs: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    shards: int = 1
    condition: str = ""
    soft_exit: int | None = None
    after_failures: bool = False


def steps(ws: Workspace, gpu_tags: Iterable[str] | None = None) -> list[Step]:
    """Return all steps in order.

    Args:
        ws: the checkout; its pins are the lines.
        gpu_tags: queue tags for which there are agents; default: all of `GPU_QUEUES`.

    Raises:
        UsageError: a tag is unknown.
    """
    lines = pins.lines(ws)
    tags = [queue.tag for queue in GPU_QUEUES] if gpu_tags is None else list(gpu_tags)
    unknown = set(tags) - {queue.tag for queue in GPU_QUEUES}
    if unknown:
        known = ", ".join(queue.tag for queue in GPU_QUEUES)
        raise UsageError(f"no GPU queue is named {', '.join(sorted(unknown))}", fix=f"known are {known}")
    found = [
        *_checks(lines),
        *_wheels(lines),
        _upstream_short(),
        *(_upstream(line) for line in lines),
        *(_gpu(line, queue) for queue in GPU_QUEUES if queue.tag in tags for line in lines),
        _canary(),
    ]
    found.append(_annotate(found))
    return found


def local_steps(ws: Workspace) -> list[Step]:
    """All steps, and what only a run on one machine has: all stages of the tests with one table."""
    whole = Step("test", "", "our tests and the short upstream diff, in stages", "scripts/test.sh")
    return [*steps(ws), whole]


def _checks(lines: Sequence[str]) -> list[Step]:
    found = [
        Step("lint", "checks", "static checks", "scripts/test.sh --only lint", minutes=10),
        Step("unit", "checks", "unit tests", "scripts/test.sh --only unit", minutes=20),
        Step("real", "checks", "tests on real trees and wheels", "scripts/test.sh --only real"),
    ]
    for line in lines:
        refreshed = f"build/refresh/{line}.patch"
        label = f"verify {line}"
        found.append(
            Step(
                f"verify-{line}", "checks", label, f"ci/verify.sh {line}", minutes=10, artifacts=(refreshed,)
            )
        )
    overlay = "scripts/lib/run.sh series overlay-test"
    for line in lines:
        found.append(Step(f"overlay-{line}", "checks", f"overlay tests {line}", f"{overlay} {line}"))
    return found


def _wheels(lines: Sequence[str]) -> list[Step]:
    found = []
    for line in lines:
        build = Step(
            f"build-{line}", "wheels", f"build {line}", f"scripts/build.sh {line}", artifacts=("dist/*.whl",)
        )
        again = Step(
            f"rebuild-{line}",
            "wheels",
            f"build {line} again elsewhere, compare sha256",
            f"ci/rebuild.sh {line}",
            needs=(build.key,),
        )
        found += [build, again]
    return found


def _upstream_short() -> Step:
    command = "scripts/test.sh --only envs,upstream"
    return Step(
        "upstream-short", UPSTREAM, "short diff, and that a planted fault is found", command, minutes=60
    )


def _upstream(line: str) -> Step:
    return Step(
        f"upstream-{line}",
        UPSTREAM,
        f"upstream diff {line}",
        f"ci/upstream.sh {line}",
        minutes=240,
        shards=UPSTREAM_SHARDS,
        artifacts=("build/baseline/reports/**/*.md",),
    )


def _gpu(line: str, queue: GpuQueue) -> Step:
    return Step(
        f"gpu-{queue.tag}-{line}",
        "GPU suite",
        f"{queue.label} {line}",
        f"ci/gpu.sh {line} {queue.options}".strip(),
        queue=queue.tag,
        minutes=120,
        needs=(f"build-{line}",),
        artifacts=("build/gpu-results/**/*", "build/gpu-logs/*"),
    )


def _canary() -> Step:
    return Step(
        "canary",
        "nightly",
        "the newest upstream release",
        "scripts/lib/run.sh series canary --out build/canary",
        artifacts=("build/canary/*",),
        condition="build.source == 'schedule'",
        soft_exit=3,  # a person is needed: no fault of this commit
    )


def _annotate(before: Sequence[Step]) -> Step:
    return Step(
        "annotate",
        "summary",
        "annotate the build",
        "ci/annotate.sh",
        minutes=10,
        needs=tuple(step.key for step in before),
        after_failures=True,
    )


def run(ws: Workspace, keys: Sequence[str]) -> None:
    """Run steps here, one after the other; the first that fails ends it.

    Raises:
        UsageError: a key is unknown.
        CheckFailed: a step failed.
    """
    known = {step.key: step for step in local_steps(ws)}
    wrong = [key for key in keys if key not in known]
    if wrong:
        raise UsageError(f"there is no step {', '.join(wrong)}", fix="ci/local.sh --list")
    for key in keys:
        step = known[key]
        say(f"ci: {time.strftime('%H:%M:%S', time.gmtime())} {step.label}: {step.command}")
        code = subprocess.run(["bash", "-c", step.command], cwd=ws.root, check=False).returncode
        if code and code != step.soft_exit:
            raise CheckFailed(
                f"step {key} failed with {code} (its messages are above)", fix=f"ci/local.sh {key}"
            )
