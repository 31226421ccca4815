# SPDX-License-Identifier: Apache-2.0
"""GSM8K on two servers of the same model, upstream's and the patched one. Not run by this project.

    gsm8k.py --data test.jsonl --train train.jsonl --model NAME --line 0.33.0 --card h200 \\
        --baseline http://HOST:8000 --ours http://HOST:8001

The files are the data set's own (objects with `question` and `answer`; the result stands behind `####`). Each
question is asked after `--shots` solved ones of the training file. An answer is right if its last number is
the result.
"""

from __future__ import annotations

import argparse
import re
import sys
from decimal import Decimal, InvalidOperation
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def number(text: str) -> Decimal | None:
    """Return the last number of a text; thousands separators and a dollar sign do not count."""
    found = NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def expected(answer: str) -> Decimal:
    """Return the result that a solution of the data set states behind ``####``.

    Raises:
        ValueError: there is none.
    """
    found = number(answer.partition("####")[2])
    if found is None:
        raise ValueError(f"a solution without a result: {answer[-80:]!r}")
    return found


def score(reply: str, answer: str) -> float:
    """1 if the last number of the reply is the result, else 0."""
    return float(number(reply) == expected(answer))


def messages(question: str, solved: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the chat: solved examples, then the question."""
    chat = []
    for one in solved:
        chat.append({"role": "user", "content": one["question"]})
        chat.append({"role": "assistant", "content": one["answer"].replace("####", "The answer is")})
    return [*chat, {"role": "user", "content": question + "\nEnd with: The answer is <number>"}]


def main() -> None:
    """Ask both servers and store the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=1024)
    common.add_server_options(parser)
    args = parser.parse_args()
    questions = common.read_jsonl(args.data, args.limit)
    solved = common.read_jsonl(args.train, args.shots)
    answers = common.both(args, [messages(one["question"], solved) for one in questions], args.max_tokens)
    scores = [
        [score(reply, one["answer"]) for reply, one in zip(side, questions, strict=True)] for side in answers
    ]
    case = f"gsm8k shots={args.shots} model={args.model}"
    common.store(args, common.rows_of("accuracy", [(case, common.paired(*scores))]))


if __name__ == "__main__":
    main()
