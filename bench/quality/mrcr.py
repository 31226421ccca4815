# SPDX-License-Identifier: Apache-2.0
"""MRCR with two needles, per length bucket, on two servers of the same model. Not run by this project.

    mrcr.py --data mrcr_2needle.jsonl --model NAME --line 0.33.0 --card h200 \\
        --baseline http://HOST:8000 --ours http://HOST:8001 [--lengths 8192,131072]

The file is OpenAI's MRCR data set (huggingface.co/datasets/openai/mrcr, 2needle) as JSON lines with `prompt`
(the chat, as a JSON text), `answer`, `random_string_to_prepend` and, for the buckets, `n_tokens`; without it
the length is estimated as a quarter of the characters. As the data set defines it, a reply that does not
begin with the random string scores 0, any other the similarity (difflib's ratio) of what comes behind it.
"""

from __future__ import annotations

import argparse
import bisect
import json
import sys
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

#: Upper ends of the buckets, in tokens.
BUCKETS = (8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)


def score(reply: str, answer: str, prefix: str) -> float:
    """Return the similarity of reply and answer behind the prefix, 0 if the reply lacks the prefix."""
    if not reply.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, reply.removeprefix(prefix), answer.removeprefix(prefix)).ratio()


def length(row: dict[str, Any]) -> int:
    """Tokens of a question: as stated, else a quarter of its characters."""
    return int(row.get("n_tokens") or len(row["prompt"]) // 4)


def bucket(tokens: int) -> int | None:
    """Return the upper end of the bucket of a length, None for one above all buckets."""
    place = bisect.bisect_left(BUCKETS, tokens)
    return BUCKETS[place] if place < len(BUCKETS) else None


def by_bucket(rows: list[dict[str, Any]], sides: list[list[float]]) -> list[tuple[int, common.Paired]]:
    """Pair the scores of both sides within each bucket, in the order of length."""
    groups: dict[int, tuple[list[float], list[float]]] = {}
    for number, row in enumerate(rows):
        end = bucket(length(row))
        if end is not None:
            pair = groups.setdefault(end, ([], []))
            for side, scores in zip(pair, sides, strict=True):
                side.append(scores[number])
    return [(end, common.paired(*groups[end])) for end in sorted(groups)]


def main() -> None:
    """Ask both servers and store the comparison per bucket."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--lengths", default="", help="only buckets that end here, separated by commas")
    parser.add_argument("--max-tokens", type=int, default=4096)
    common.add_server_options(parser)
    args = parser.parse_args()
    wanted = {int(one) for one in args.lengths.split(",") if one}
    rows = [
        row
        for row in common.read_jsonl(args.data)
        if bucket(length(row)) is not None and (not wanted or bucket(length(row)) in wanted)
    ][: args.limit]
    answers = common.both(args, [json.loads(row["prompt"]) for row in rows], args.max_tokens)
    sides = [
        [
            score(reply, row["answer"], row["random_string_to_prepend"])
            for reply, row in zip(side, rows, strict=True)
        ]
        for side in answers
    ]
    cases = [(f"mrcr needles=2 tokens<={end} model={args.model}", one) for end, one in by_bucket(rows, sides)]
    common.store(args, common.rows_of("similarity", cases))


if __name__ == "__main__":
    main()
