"""Which of upstream's test files one of several parallel jobs runs."""

from __future__ import annotations

from collections.abc import Mapping


def shard(seconds: Mapping[str, float], index: int, of: int) -> list[str]:
    """Return the files of job ``index``; all jobs together have each file once.

    The longest file goes first, each to the job with the least so far, so that the jobs end together.

    Args:
        seconds: estimate by file.
        index: number of this job, from 0.
        of: number of jobs.
    """
    loads = [0.0] * of
    mine = []
    for name in sorted(seconds, key=lambda one: (-seconds[one], one)):
        least = loads.index(min(loads))
        loads[least] += seconds[name]
        if least == index:
            mine.append(name)
    return sorted(mine)
