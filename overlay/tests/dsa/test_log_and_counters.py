# SPDX-License-Identifier: Apache-2.0
"""Lines come once per process and key; counters are exact and start anew in a forked process."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable

from vllm.dsa import counters, features, log


def in_child(check: Callable[[], bool]) -> bool:
    """Run ``check`` in a forked process and return what it said."""
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            ok = check()
        finally:
            os._exit(0 if ok else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_once_per_key(caplog_vllm):
    assert log.info_once("a", "first %s", "line")
    assert not log.info_once("a", "first %s", "again")
    assert not log.warning_once("a", "same key")
    assert log.warning_once("b", "second")
    messages = [(record.levelname, record.getMessage()) for record in caplog_vllm.records]
    assert messages == [("INFO", "first line"), ("WARNING", "second")]
    assert {record.filename for record in caplog_vllm.records} == {"test_log_and_counters.py"}
    assert {record.name for record in caplog_vllm.records} == {"vllm.dsa"}


def test_forked_process_logs_its_own_line():
    assert log.info_once("a", "x")
    assert in_child(lambda: log.info_once("a", "x"))
    assert not log.info_once("a", "x")


def test_reports_are_one_line_per_reason(caplog_vllm):
    for _ in range(3):
        features.report_declined("overlap", "no card")
        features.report_declined("overlap", "too long")
        features.report_active("litetopk")
    assert [record.getMessage() for record in caplog_vllm.records] == [
        "vllm.dsa overlap: declined (no card), upstream's path is used",
        "vllm.dsa overlap: declined (too long), upstream's path is used",
        "vllm.dsa litetopk: active",
    ]
    assert [row["count"] for row in counters.snapshot()] == [3, 3, 3]


def test_counts_are_exact_under_threads():
    def work():
        for _ in range(5000):
            counters.count("overlap", "active")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot("overlap") == [
        {"feature": "overlap", "outcome": "active", "reason": "", "count": 20000}
    ]
    assert counters.snapshot("litetopk") == []


def test_forked_process_counts_from_zero():
    counters.count("overlap", "active")
    assert in_child(lambda: counters.snapshot() == [])
    assert len(counters.snapshot()) == 1


def test_reasons_do_not_grow_without_bound():
    for number in range(counters.MAX_KEYS + 100):
        counters.count("overlap", "declined", f"{number} tokens")
    rows = counters.snapshot()
    assert len(rows) == counters.MAX_KEYS + 1
    assert sum(row["count"] for row in rows) == counters.MAX_KEYS + 100
    assert [row["count"] for row in rows if row["reason"] == counters.OTHER] == [100]


def test_summary_at_exit():
    code = """
from tests.dsa.conftest import configure_logging
from vllm.dsa import counters
configure_logging()
counters.count("overlap", "declined", "no card", 2)
counters.count("fused_q", "active")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "did in this process" in line]
    assert line.endswith("fused_q active: 1; overlap declined (no card): 2")


def test_summary_at_the_end_of_a_forked_worker():
    """vLLM's workers are such by default; they end without Python's own exit handlers."""
    code = """
import multiprocessing
from tests.dsa.conftest import configure_logging
from vllm.dsa import counters
configure_logging()
counters.count("overlap", "active")
def work():
    counters.count("fused_q", "active", n=3)
worker = multiprocessing.get_context("fork").Process(target=work)
worker.start()
worker.join()
print("worker ended", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "did in this process" in line]
    ends = sorted(line.partition("process: ")[2] for line in lines)
    assert ends == ["fused_q active: 3", "overlap active: 1"]


def test_no_summary_when_nothing_was_counted(caplog_vllm):
    counters.log_summary()
    assert caplog_vllm.records == []
