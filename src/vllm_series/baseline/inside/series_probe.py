"""pytest plugin: notes what was collected and which test runs now, and leaves out tests that are done.

``SERIES_EVENTS`` names the JSONL file it appends to. ``SERIES_DONE`` names a file of node ids to leave out
(one a line), ``SERIES_ONLY`` one of node ids to run alone. Each event is written before the test starts, so
a test that takes the process down is known by name.
"""

import json
import os
import time
from collections.abc import Generator

import pytest

_events = open(os.environ["SERIES_EVENTS"], "a", encoding="utf-8", buffering=1)  # noqa: SIM115, PTH123


def _say(**event: object) -> None:
    event["t"] = round(time.time(), 3)
    _events.write(json.dumps(event) + "\n")


def _ids(variable: str) -> set[str] | None:
    path = os.environ.get(variable)
    if not path:
        return None
    with open(path, encoding="utf-8") as handle:  # noqa: PTH123
        return set(handle.read().splitlines())


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    yield
    _say(e="collected", n=[item.nodeid for item in items])
    done, only = _ids("SERIES_DONE"), _ids("SERIES_ONLY")
    keep: list[pytest.Item] = []
    drop: list[pytest.Item] = []
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
