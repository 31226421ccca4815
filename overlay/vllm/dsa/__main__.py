# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm.dsa [--json]``: print what this build is and what its features would do here."""

from __future__ import annotations

import argparse
import json

from vllm.dsa.report import info, readable


def main() -> None:
    """Print `vllm.dsa.info()`."""
    parser = argparse.ArgumentParser(prog="python -m vllm.dsa", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    arguments = parser.parse_args()
    data = info()
    print(json.dumps(data, indent=2) if arguments.json else readable(data))


if __name__ == "__main__":
    main()
