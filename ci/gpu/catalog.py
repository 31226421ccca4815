"""The GPU suite's rows (suites.toml) and the machine that they are to run on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import run_info

ROOT = Path(__file__).resolve().parents[2]
SUITES = Path(__file__).with_name("suites.toml")
TESTS = "overlay/tests/dsa"

PROBE = """
import json
said = {}
try:
    import torch
    said["torch"] = torch.__version__
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    said["cards"] = [
        {"name": torch.cuda.get_device_name(i), "capability": "%d.%d" % torch.cuda.get_device_capability(i)}
        for i in range(count)
    ]
except ImportError as error:
    said["error"] = f"no torch: {error}"
try:
    import vllm.dsa
    info = vllm.dsa.info()
    said |= {"line": info["line"], "version": info["version"], "kernels": info["kernels"]["reason"]}
    from vllm.dsa.logits_slab import extension
    said["deepgemm"] = extension.patched()
except ImportError as error:
    said["vllm_error"] = str(error)
print("RESULT " + json.dumps(said))
"""


class SuiteError(Exception):
    """The call or the machine does not fit; the message names what to do."""


@dataclass(frozen=True)
class Step:
    """One command of a suite: all its tests, or one benchmark."""

    suite: str
    name: str
    seconds: float
    capabilities: tuple[str, ...]
    lines: tuple[str, ...]
    gpus: int
    kernels: bool
    deepgemm: bool = False
    tests: tuple[str, ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Machine:
    """What the Python at hand sees. ``kernels`` is why there are none, '' if they are loaded; ``deepgemm`` is
    whether DeepGEMM carries the series' patch."""

    name: str
    capability: str
    cards: int
    line: str
    version: str
    kernels: str
    torch: str
    driver: str = "unknown"
    deepgemm: bool = False

    @property
    def card(self) -> str:
        """Short name for file names: h200, b200, gb300; other names in lower case with dashes."""
        known = re.search(r"\b(G?[HB]\d{2,3})\b", self.name)
        return (known[1] if known else re.sub(r"\W+", "-", self.name).strip("-")).lower()


def load(path: Path = SUITES) -> dict[str, tuple[str, list[Step]]]:
    """Return title and steps by suite, in the file's order.

    Raises:
        SuiteError: a key is missing or unknown, or a file that it names does not exist.
    """
    found: dict[str, tuple[str, list[Step]]] = {}
    for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        known = {"title", "capabilities", "lines", "gpus", "kernels", "deepgemm", "seconds", "tests", "bench"}
        if set(table) - known or {"title", "capabilities", "lines", "seconds", "tests"} - set(table):
            raise SuiteError(
                f"{path.name}: [{name}] has a missing or unknown key: {', '.join(sorted(table))}"
            )
        common: dict[str, Any] = {
            "lines": tuple(table["lines"]),
            "gpus": table.get("gpus", 1),
            "kernels": table.get("kernels", False),
            "deepgemm": table.get("deepgemm", False),
            "capabilities": tuple(table["capabilities"]),
        }
        tests = tuple(table["tests"])
        steps = [Step(name, "tests", table["seconds"], tests=tests, **common)] if tests else []
        for bench in table.get("bench", ()):
            if {"name", "seconds", "command"} - set(bench):
                raise SuiteError(f"{path.name}: a bench of [{name}] lacks name, seconds or command")
            own = {"gpus": bench.get("gpus", common["gpus"])}
            own["capabilities"] = tuple(bench.get("capabilities", common["capabilities"]))
            fields = {**common, **own, "command": " ".join(bench["command"].split())}
            steps.append(Step(name, bench["name"], bench["seconds"], **fields))
        files = [f"{TESTS}/{test}" for test in tests]
        for file in (*files, *(step.command.split()[0] for step in steps if step.command)):
            if not (ROOT / file).exists():
                raise SuiteError(f"{path.name}: [{name}] names {file}, which does not exist")
        found[name] = (table["title"], steps)
    return found


def look(python: str = sys.executable) -> Machine:
    """Ask ``python`` for card, torch and vLLM, in a process of its own.

    Raises:
        SuiteError: no card, no torch or no patched vLLM.
    """
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, env=environment, check=False)
    answers = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not answers:
        raise SuiteError(f"{python} cannot be asked:\n{done.stderr.strip()[-1500:]}")
    said: dict[str, Any] = json.loads(answers[-1])
    wheel = "install the wheel from dist/ and pytest there, or PYTHON=/path/to/python scripts/test.sh --gpu"
    if "error" in said:
        raise SuiteError(f"{python} has {said['error']}\n  fix: {wheel}")
    if not said["cards"]:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        fix = "run it on a machine with a Hopper or Blackwell card; --list shows what there is to run"
        if hidden is not None:
            fix = f"CUDA_VISIBLE_DEVICES='{hidden}' names the cards that may be used: unset it; or {fix}"
        raise SuiteError(f"torch {said['torch']} of {python} sees no CUDA device\n  fix: {fix}")
    if "vllm_error" in said:
        raise SuiteError(f"{python} has no patched vLLM ({said['vllm_error']})\n  fix: {wheel}")
    first = said["cards"][0]
    return Machine(
        first["name"],
        first["capability"],
        sum(one == first for one in said["cards"]),
        said["line"],
        said["version"],
        said["kernels"],
        said["torch"],
        run_info.driver(),
        bool(said.get("deepgemm")),
    )


def commit(root: Path) -> str:
    """The checkout's commit, with ``-dirty`` if tracked files differ from it; ``unknown`` without git."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def unsupported(step: Step, machine: Machine) -> str:
    """Return why the step does not exist on this machine, '' if it does."""
    if machine.capability not in step.capabilities:
        return (
            f"for compute capability {', '.join(step.capabilities)}; {machine.name} has {machine.capability}"
        )
    if machine.line not in step.lines:
        return f"for line {', '.join(step.lines)}; installed is {machine.version}"
    if machine.cards < step.gpus:
        return f"needs {step.gpus} cards, there is {machine.cards}"
    if step.deepgemm and not machine.deepgemm:
        return "needs a DeepGEMM with the series' patch (docs/deepgemm.md)"
    return ""
