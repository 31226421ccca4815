"""Runs on the scratch environment's interpreter with the standard library alone: what is installed?

Reads one JSON object from stdin (``version``, ``expected``: path in site-packages -> sha256 hex) and
prints one with ``problems`` (list of sentences) and what it saw. Not imported by the tool.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import py_compile
import sys
import tempfile
from pathlib import Path
from typing import Any


def digest(path: Path) -> bytes:
    found = hashlib.sha256()  # hashlib.file_digest is new in Python 3.11; line 0.28.0 allows 3.10
    with path.open("rb") as handle:
        while piece := handle.read(1 << 20):
            found.update(piece)
    return found.digest()


def check_record(site: Path, info: Path, problems: list[str]) -> set[str]:
    """Compare each file that RECORD names with its hash and size; look for files that it does not name."""
    named: set[str] = set()
    with (info / "RECORD").open(newline="", encoding="utf-8") as handle:
        for name, wanted, size in csv.reader(handle):
            named.add(name)
            path = site / name
            if not path.is_file():
                problems.append(f"RECORD names {name}, which is not installed")
            elif wanted:
                found = base64.urlsafe_b64encode(digest(path)).rstrip(b"=").decode()
                if wanted != f"sha256={found}" or int(size) != path.stat().st_size:
                    problems.append(f"{name} is not the file that RECORD describes")
    for path in (site / "vllm").rglob("*"):
        name = path.relative_to(site).as_posix()
        if path.is_file() and name not in named and "__pycache__" not in path.parts:
            problems.append(f"{name} is installed but not in RECORD")
    return named


def check_compiles(site: Path, names: list[str], problems: list[str]) -> int:
    """Byte-compile the Python files among ``names`` without leaving anything behind."""
    count = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            if not name.endswith(".py") or not (site / name).is_file():
                continue
            count += 1
            try:
                py_compile.compile(str(site / name), cfile=f"{scratch}/x.pyc", dfile=name, doraise=True)
            except py_compile.PyCompileError as error:
                problems.append(f"{name} does not compile: {error.msg.strip()}")
    return count


def main() -> int:
    asked: dict[str, Any] = json.load(sys.stdin)
    problems: list[str] = []
    found = importlib.metadata.distribution("vllm")
    site = Path(str(found.locate_file("")))
    if found.version != asked["version"]:
        problems.append(f"the metadata say version {found.version}, expected {asked['version']}")
    named = check_record(site, site / f"vllm-{asked['version']}.dist-info", problems)
    for name, wanted in asked["expected"].items():
        if not (site / name).is_file():
            problems.append(f"{name} is not installed")
        elif digest(site / name).hex() != wanted:
            problems.append(f"{name} differs from the patched tree")
    compiled = check_compiles(site, list(asked["expected"]), problems)
    module: dict[str, Any] = {}
    exec((site / "vllm/_version.py").read_text(encoding="utf-8"), module)
    if module["__version__"] != asked["version"]:
        problems.append(f"vllm/_version.py says {module['__version__']}, expected {asked['version']}")
    seen = {
        "python": "%d.%d.%d" % sys.version_info[:3],  # noqa: UP031
        "files": len(named),
        "compiled": compiled,
        "requires": len(found.requires or []),
        "problems": problems,
    }
    print(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
