"""What `scripts/test.sh --upstream` hands to the tool."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "scripts" / "test.sh").read_text()


def handed_on(*words: str) -> list[str]:
    """Run the script's own function with a `series` that prints its arguments."""
    body = SCRIPT[SCRIPT.index("run_whole() {") :].split("\n}\n")[0] + "\n}\n"
    fake = 'series() { printf \'%s\\n\' "$@"; }; fail() { echo "error: $1" >&2; exit 2; }\n'
    done = subprocess.run(
        ["bash", "-c", f'set -euo pipefail\n{fake}{body}run_whole "$@"', "test", *words],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.split()


FULL = ["diff", "--set", "full"]
EVERY = ["--modes", "off,on,features"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], [*FULL, *EVERY]),
        (["0.33.0"], [*FULL, "0.33.0", *EVERY]),
        (
            ["0.33.0", "--select", "tests/v1/*mla*", "indexer", "--resume"],
            [*FULL, "0.33.0", "--select", "tests/v1/*mla*", "--select", "indexer", "--resume", *EVERY],
        ),
        (
            ["--mode", "off", "overlap=full", "--select", "indexer", "--jobs", "1"],
            [*FULL, "--select", "indexer", "--jobs", "1", "--modes", "off,overlap=full"],
        ),
        (
            ["0.33.0", "--mode", "off", "--mode", "on"],
            [*FULL, "0.33.0", "--modes", "off,on"],
        ),
        (["--gpu", "0.33.0"], ["gpu", "0.33.0"]),
        (["0.33.0", "--gpu", "--mode", "on", "--store"], ["gpu", "0.33.0", "--store", "--modes", "on"]),
    ],
)
def test_upstream_options_are_the_tools(words: list[str], found: list[str]) -> None:
    assert handed_on(*words) == ["baseline", *found]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--upstream", "--select"], "error: --select needs a name"),
        (["--upstream", "0.33.0", "--mode", "--gpu"], "error: --mode needs a name"),
    ],
)
def test_upstream_refuses_half_options(words: list[str], says: str) -> None:
    done = subprocess.run(["bash", ROOT / "scripts/test.sh", *words], capture_output=True, text=True)
    assert done.returncode == 2 and says in done.stderr


def test_usage_names_what_upstream_takes() -> None:
    done = subprocess.run(["bash", ROOT / "scripts/test.sh", "--help"], capture_output=True, text=True)
    for word in ("--upstream [LINE...]", "--select PATTERN", "--mode NAME", "--gpu"):
        assert word in done.stdout
