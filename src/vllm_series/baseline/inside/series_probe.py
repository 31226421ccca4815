"""pytest plugin: notes what was collected and which test runs now, and leaves out tests that are done.

``SERIES_EVENTS`` names the JSONL file it appends to. ``SERIES_DONE`` names a file of node ids to leave out
(one a line), ``SERIES_ONLY`` one of node ids to run alone. Of more than ``SERIES_SAMPLE`` tests only that
many run: the same ones in every run of the file. Each event is written before the test starts, so a test that
takes the process down is known by name.
"""

import functools
import hashlib
import json
import os
import time
from collections.abc import Generator
from typing import TextIO

import pytest


@functools.cache
def _events() -> TextIO:
    return open(os.environ["SERIES_EVENTS"], "a", encoding="utf-8", buffering=1)  # noqa: PTH123


def _say(**event: object) -> None:
    event["t"] = round(time.time(), 3)
    _events().write(json.dumps(event) + "\n")


def _ids(variable: str) -> set[str] | None:
    path = os.environ.get(variable)
    if not path:
        return None
    with open(path, encoding="utf-8") as handle:  # noqa: PTH123
        return set(handle.read().splitlines())


def sample(names: list[str], number: int) -> list[str]:
    """Return ``number`` of the node ids: of each test function the parameters with the smallest hashes.

    One of every function comes before the second of any, so that what runs first has seen them all.
    """
    functions: dict[str, list[str]] = {}
    for name in names:
        functions.setdefault(name.partition("[")[0], []).append(name)
    layers: list[tuple[int, int, str]] = []
    for place, nodes in enumerate(functions.values()):
        nodes.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        layers += [(layer, place, name) for layer, name in enumerate(nodes)]
    return [name for _, _, name in sorted(layers)[:number]]


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    yield
    _say(e="collected", n=[item.nodeid for item in items])
    done, only = _ids("SERIES_DONE"), _ids("SERIES_ONLY")
    number, drop = int(os.environ.get("SERIES_SAMPLE") or 0), list[pytest.Item]()
    if number and len(items) > number and only is None:
        order = {name: place for place, name in enumerate(sample([item.nodeid for item in items], number))}
        drop = [item for item in items if item.nodeid not in order]
        items[:] = sorted((one for one in items if one.nodeid in order), key=lambda one: order[one.nodeid])
        _say(e="left_out", n=[item.nodeid for item in drop])
    keep: list[pytest.Item] = []
    for item in items:
        wanted = (only is None or item.nodeid in only) and (done is None or item.nodeid not in done)
        (keep if wanted else drop).append(item)
    if drop:
        items[:] = keep
        config.hook.pytest_deselected(items=drop)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    _say(e="start", n=nodeid)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    _say(e="finish", n=nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    _say(e="end", n=int(exitstatus))
