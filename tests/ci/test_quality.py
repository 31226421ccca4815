"""bench/quality: the scoring, on a CPU; the servers and the weights are the user's."""

from __future__ import annotations

import argparse
import json
import random
import sys
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "quality"))
import common
import gsm8k
import mrcr
import recall


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 3 and then 1,234.", "1234"),
        ("The answer is $-12.50", "-12.50"),
        ("it costs $1,000,000 in all", "1000000"),
        ("-$7", "-7"),
        ("3 apples, 4 pears = **7**.", "7"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(text: str, value: str | None) -> None:
    assert gsm8k.number(text) == (None if value is None else Decimal(value))


def test_gsm8k_scores_by_value() -> None:
    answer = "Two and two.\n#### 1,200"
    assert gsm8k.score("The answer is 1200.00", answer) == 1.0
    assert gsm8k.score("1200 at first, but then 1201", answer) == 0.0
    assert gsm8k.score("I do not know", answer) == 0.0
    with pytest.raises(ValueError, match="without a result"):
        gsm8k.score("1", "no result here")


def test_gsm8k_chat_ends_with_the_question_and_hides_no_result() -> None:
    chat = gsm8k.messages("Q?", [{"question": "q", "answer": "a\n#### 4"}])
    assert [one["role"] for one in chat] == ["user", "assistant", "user"]
    assert chat[1]["content"].endswith("The answer is 4") and chat[-1]["content"].startswith("Q?")


def test_mrcr_score() -> None:
    assert mrcr.score("abcXYZ the poem", "abcXYZ the poem", "abcXYZ") == 1.0
    assert mrcr.score("the poem", "abcXYZ the poem", "abcXYZ") == 0.0
    assert mrcr.score(" abcXYZ the poem", "abcXYZ the poem", "abcXYZ") == 0.0, "it must begin with the string"
    half = mrcr.score("abcXYZab", "abcXYZabcd", "abcXYZ")
    assert half == pytest.approx(2 * 2 / (2 + 4)), "the prefix itself does not count"


def test_mrcr_buckets() -> None:
    assert [mrcr.bucket(n) for n in (1, 8192, 8193, 1048576, 1048577)] == [8192, 8192, 16384, 1048576, None]
    assert mrcr.length({"n_tokens": 5, "prompt": "x" * 400}) == 5
    assert mrcr.length({"prompt": "x" * 400}) == 100
    rows = [{"n_tokens": n, "prompt": ""} for n in (9000, 100, 9001, 2 << 20)]
    found = mrcr.by_bucket(rows, [[0.5, 1.0, 0.7, 0.0], [0.6, 1.0, 0.6, 1.0]])
    assert [(end, one.n) for end, one in found] == [(8192, 1), (16384, 2)]
    assert found[1][1].difference == pytest.approx(0.0)


def test_paired_statistics() -> None:
    one = common.paired([1, 0, 1, 1], [1, 1, 0, 1])
    assert (one.n, one.baseline, one.ours, one.difference) == (4, 0.75, 0.75, 0.0)
    assert one.standard_error == pytest.approx((2 / 3 / 4) ** 0.5)
    assert common.paired([0.3], [0.4]).standard_error == 0.0
    for bad in (([1.0], []), ([], [])):
        with pytest.raises(ValueError, match="cannot be paired"):
            common.paired(*bad)


def dump(seed: int, queries: int = 3, heads: int = 4, keys: int = 200) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "q": rng.standard_normal((queries, heads, 8)),
        "k": rng.standard_normal((keys, 8)),
        "k_scale": rng.random(keys),
        "weights": rng.standard_normal((queries, heads)),
        "ks": np.array([0, 10, 100][:queries]),
        "ke": np.array([200, 30, 100][:queries]),
    }


def test_scores_are_the_indexers() -> None:
    """Against the formula, key by key."""
    data = dump(0)
    for row in range(3):
        found = recall.scores(data, row)
        assert len(found) == data["ke"][row] - data["ks"][row]
        for place, value in enumerate(found):
            j = data["ks"][row] + place
            dots = [max(0.0, float(data["q"][row, h] @ data["k"][j])) for h in range(4)]
            wanted = data["k_scale"][j] * sum(w * d for w, d in zip(data["weights"][row], dots, strict=True))
            assert value == pytest.approx(wanted)


def test_recall_counts_what_is_found() -> None:
    rng = random.Random(1)
    values = np.array([rng.gauss(0, 1) for _ in range(300)])
    order = np.argsort(-values)
    assert recall.recall(order[:64], values) == 1.0
    assert recall.recall(order[64:128], values, 0.0) == 0.0
    mixed = np.concatenate([order[:32], order[200:232]])
    assert recall.recall(mixed, values) == 0.5
    assert recall.recall(np.concatenate([order[:32], order[:32]]), values) == 0.5, "duplicates count once"
    assert recall.recall(np.concatenate([order[:32], np.full(32, -1)]), values) == 0.5
    assert recall.recall(np.concatenate([order[:32], np.full(32, 300)]), values) == 0.5, "out of range"


def test_recall_with_few_keys_ties_and_nan() -> None:
    assert recall.recall(np.array([1, 0, -1, -1]), np.array([1.0, 2.0])) == 1.0
    assert recall.recall(np.full(4, -1), np.array([])) == 1.0
    assert recall.recall(np.array([3, 4]), np.ones(9)) == 1.0, "equal scores may be exchanged"
    assert recall.recall(np.array([0]), np.array([np.nan, 1.0])) == 0.0
    assert recall.recall(np.array([0]), np.array([0.9995, 1.0])) == 1.0, "within the tolerance"
    assert recall.recall(np.array([0]), np.array([0.9, 1.0])) == 0.0


class Server(BaseHTTPRequestHandler):
    """Answers each chat with its last message, or with an error where that says so."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body["messages"][-1]["content"]
        status = 500 if said == "fail" else 200
        data = json.dumps({"choices": [{"message": {"content": f"{body['temperature']} {said}"}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Stay quiet."""


def test_answers_come_in_order_and_errors_are_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    monkeypatch.setenv("NO_PROXY", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        chats = [[{"role": "user", "content": str(n)}] for n in range(20)]
        answers = common.ask_all(url, "m", chats, max_tokens=1, parallel=4)
        assert answers == [f"0 {n}" for n in range(20)]
        with pytest.raises(httpx.HTTPStatusError):
            common.ask_all(url, "m", [[{"role": "user", "content": "fail"}]], max_tokens=1, parallel=1)
    finally:
        server.shutdown()
        server.server_close()


def test_results_are_appended(tmp_path: Path) -> None:
    args = argparse.Namespace(out=tmp_path, line="0.33.0", card="h200")
    rows = common.rows_of("accuracy", [("gsm8k", common.paired([1, 0], [1, 1]))])
    said: list[str] = []
    path = common.store(args, rows, said.append)
    common.store(args, rows, said.append)
    data = json.loads(path.read_text())
    assert data["kind"] == "ratio" and len(data["rows"]) == 2
    assert (data["rows"][0]["baseline"], data["rows"][0]["ours"], data["rows"][0]["ratio"]) == (0.5, 1.0, 2.0)
    assert "0.5000 to 1.0000 (+0.5000" in said[0]
