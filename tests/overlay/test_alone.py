"""vllm.dsa without torch and without vLLM around it: it imports, it answers, it claims nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Alone = Callable[..., subprocess.CompletedProcess[str]]

# All modules that importing vllm.dsa may load besides its own: the standard library.
IMPORT = """
import sys
import vllm.dsa
loaded = {name.partition(".")[0] for name in sys.modules}
print(sorted(loaded - set(sys.stdlib_module_names) - {"vllm", "__main__"}))
"""


def test_importing_loads_only_the_standard_library(alone: Alone) -> None:
    done = alone("-c", IMPORT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_importing_raises_nothing_whatever_the_switches_say(alone: Alone) -> None:
    done = alone("-c", "import vllm.dsa", VLLM_DSA="?", VLLM_INDEXER_OVERLAP="?")
    assert (done.returncode, done.stderr) == (0, "")


def test_info_says_that_there_is_no_vllm_and_claims_no_feature(alone: Alone) -> None:
    done = alone("-m", "vllm.dsa", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["enabled"] is None
    assert data["line"] == data["upstream_commit"] == "unknown"
    assert data["kernels"]["loaded"] is False
    assert {row["state"] for row in data["features"].values()} == {"unavailable"}


def test_text_form(alone: Alone) -> None:
    done = alone("-m", "vllm.dsa")
    assert done.returncode == 0, done.stderr
    assert "VLLM_DSA         cannot be read" in done.stdout


def test_every_module_has_its_license_and_docstring(root: Path) -> None:
    for path in sorted((root / "overlay" / "vllm" / "dsa").glob("*.py")):
        first, second = path.read_text(encoding="utf-8").splitlines()[:2]
        assert first == "# SPDX-License-Identifier: Apache-2.0", path
        assert second.startswith('"""'), path


def test_it_is_code_for_python_3_10(root: Path) -> None:
    """Line 0.28.0 supports 3.10: a newer function or class of the standard library would stop its start."""
    mypy = [sys.executable, "-m", "mypy", "--python-version", "3.10", "overlay/vllm/dsa"]
    done = subprocess.run(mypy, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("folder", ["vllm/dsa", "tests/dsa"])
def test_every_package_folder_has_its_init(root: Path, folder: str) -> None:
    """A folder without one is left out of upstream's package discovery, so out of a source-built wheel."""
    top = root / "overlay" / folder
    for path in top.rglob("*.py"):
        for parent in [path.parent, *path.parent.parents]:
            assert (parent / "__init__.py").is_file(), parent
            if parent == top:
                break
