# SPDX-License-Identifier: Apache-2.0
"""What the quality scripts share: asking two servers, paired statistics, and the results file."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Paired:
    """Scores of the same questions on both sides. ``standard_error`` is of the mean difference."""

    n: int
    baseline: float
    ours: float
    difference: float
    standard_error: float


def paired(baseline: Sequence[float], ours: Sequence[float]) -> Paired:
    """Compare two lists of scores of the same questions in the same order.

    Raises:
        ValueError: they differ in length, or are empty.
    """
    if len(baseline) != len(ours) or not baseline:
        raise ValueError(f"{len(baseline)} and {len(ours)} scores cannot be paired")
    n = len(baseline)
    deltas = [b - a for a, b in zip(baseline, ours, strict=True)]
    mean = sum(deltas) / n
    variance = sum((one - mean) ** 2 for one in deltas) / (n - 1) if n > 1 else 0.0
    return Paired(n, sum(baseline) / n, sum(ours) / n, mean, math.sqrt(variance / n))


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Options of a script that asks two OpenAI-compatible servers."""
    parser.add_argument("--baseline", required=True, metavar="URL", help="upstream's, or VLLM_DSA=0")
    parser.add_argument("--ours", required=True, metavar="URL", help="with the features on")
    parser.add_argument("--model", required=True, help="name under which both serve it")
    parser.add_argument("--line", required=True)
    parser.add_argument("--card", default="unknown", help="short name for the results file, such as h200")
    parser.add_argument("--limit", type=int, help="only the first N questions")
    parser.add_argument("--parallel", type=int, default=16, help="requests in flight per server")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/quality")


def ask_all(
    url: str, model: str, prompts: Sequence[list[dict[str, str]]], *, max_tokens: int, parallel: int
) -> list[str]:
    """Return the greedy answers of a server to chat prompts, in their order.

    Raises:
        httpx.HTTPError: the server does not answer or refuses a prompt; no question is left out silently.
    """
    import httpx

    with httpx.Client(base_url=url, timeout=3600) as client, ThreadPoolExecutor(parallel) as pool:

        def ask(messages: list[dict[str, str]]) -> str:
            body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
            answer = client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["message"]["content"] or "")

        return list(pool.map(ask, prompts))


def both(
    args: argparse.Namespace, prompts: Sequence[list[dict[str, str]]], max_tokens: int
) -> list[list[str]]:
    """Return the answers of the baseline and of ours."""
    return [
        ask_all(url, args.model, prompts, max_tokens=max_tokens, parallel=args.parallel)
        for url in (args.baseline, args.ours)
    ]


def read_jsonl(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object a line."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return rows[:limit]


def rows_of(metric: str, cases: Iterable[tuple[str, Paired]]) -> list[dict[str, Any]]:
    """Return rows of the results schema; ``ratio`` is ours over the baseline, 0 where that is 0."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return [
        {
            "case": case,
            "metric": metric,
            "unit": "1",
            "baseline": one.baseline,
            "ours": one.ours,
            "ratio": one.ours / one.baseline if one.baseline else 0.0,
            "standard_error": one.standard_error,
            "runs": one.n,
            "commit": commit,
            "date": date,
        }
        for case, one in cases
    ]


def store(args: argparse.Namespace, rows: list[dict[str, Any]], show: Callable[[str], None] = print) -> Path:
    """Append rows to ``<out>/<line>-<card>.json`` and show them."""
    path: Path = args.out / f"{args.line}-{args.card}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    empty = {
        "schema": 1,
        "kind": "ratio",
        "feature": "quality",
        "line": args.line,
        "card": args.card,
        "rows": [],
    }
    data = json.loads(path.read_text()) if path.is_file() else empty
    data["rows"] += rows
    path.write_text(json.dumps(data, indent=1) + "\n")
    for row in rows:
        delta = row["ours"] - row["baseline"]
        error = row["standard_error"]
        counted = f"{row['baseline']:.4f} to {row['ours']:.4f} ({delta:+.4f}, standard error {error:.4f})"
        show(f"{row['case']:<40} {counted}, n = {row['runs']}")
    return path
