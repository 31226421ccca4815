"""Tries a wheel: archive, content, and real installs on each Python that is there."""

from __future__ import annotations

import email.parser
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from vllm_series import scratch
from vllm_series.errors import CheckFailed, UsageError
from vllm_series.files import write_atomic
from vllm_series.ui import say
from vllm_series.wheel import repack
from vllm_series.wheel.archive import Source
from vllm_series.wheel.names import WheelName
from vllm_series.wheel.recipe import Recipe
from vllm_series.wheel.uvtool import Interpreter, Uv, find_uv
from vllm_series.workspace import Workspace

_PROBE = Path(__file__).with_name("probe.py")
_FULL_PROBE = """
import json, vllm, vllm.dsa
print("RESULT " + json.dumps({"version": vllm.__version__, "info": vllm.dsa.info()}))
"""


@dataclass(frozen=True)
class Installed:
    """What one scratch environment showed."""

    python: str
    files: int
    compiled: int
    requires: int


@dataclass
class Report:
    """Result of the checks; ``full`` is what ``vllm.dsa.info()`` said on ``full_python``, if asked for."""

    members: int = 0
    changed: int = 0
    installs: list[Installed] = field(default_factory=list)
    full: dict[str, Any] | None = None
    full_python: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_archive(path: Path) -> int:
    """Read each member and compare it with its checksum; returns their number.

    Raises:
        CheckFailed: names the first damaged member.
    """
    with zipfile.ZipFile(path) as wheel:
        bad = wheel.testzip()
        if bad:
            raise CheckFailed(f"{path.name}: {bad} is damaged", fix="build the wheel again")
        return len(wheel.infolist())


def check_contents(path: Path) -> None:
    """Run check-wheel-contents on the wheel.

    Raises:
        CheckFailed: it finds something. W002 (equal files) is left out: upstream has many of them.
    """
    command = [sys.executable, "-m", "check_wheel_contents", "--no-config", "--ignore", "W002", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise CheckFailed(
            "check-wheel-contents: " + "; ".join(said[:5]),
            fix="mend the overlay or the patches that bring these files",
        )


def requires_python(path: Path) -> SpecifierSet:
    """Return what METADATA says about Python versions."""
    with Source(path) as wheel:
        name = WheelName.parse(path.name)
        metadata = email.parser.BytesParser().parsebytes(
            wheel.read(f"{name.dist_info}/METADATA"), headersonly=True
        )
    return SpecifierSet(str(metadata.get("Requires-Python", "")))


def check_installs(ws: Workspace, path: Path, recipe: Recipe, report: Report) -> None:
    """Install without dependencies on each fitting Python and compare what lies there with the recipe.

    Raises:
        CheckFailed: metadata, RECORD, byte-compilation or content are not right.
    """
    expected = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in repack.new_members(recipe).items()
        if not name.endswith(".dist-info/RECORD")  # the installer appends its own lines
    }
    report.changed = len(expected)
    question = json.dumps({"version": recipe.pin.wheel_version, "expected": expected})
    with scratch.folder(ws, "install") as folder:
        uv = Uv(find_uv(ws), folder / "cache")
        for found in uv.interpreters(requires_python(path)):
            python = uv.venv(folder / f"py{found.version}", found.path)
            uv.install(python, "--no-deps", "--offline", path)
            done = subprocess.run(
                [python, "-I", _PROBE],
                input=question,
                capture_output=True,
                text=True,
                env=_plain_env(),
                check=False,
            )
            if done.returncode:
                raise CheckFailed(f"the check on Python {found.version} ended early: {done.stderr.strip()}")
            seen = json.loads(done.stdout)
            if seen["problems"]:
                more = f" (and {len(seen['problems']) - 3} more)" if len(seen["problems"]) > 3 else ""
                raise CheckFailed(
                    f"installed on Python {found.version}: " + "; ".join(seen["problems"][:3]) + more,
                    fix="remove the wheel from dist/ and build it again",
                )
            report.installs.append(
                Installed(seen["python"], seen["files"], seen["compiled"], seen["requires"])
            )
            say(f"check: installs on Python {seen['python']}: {seen['files']} files as RECORD says")
    if not report.installs:
        raise UsageError("no Python that this wheel allows is installed", fix="install Python 3.11 or newer")


def choose(found: Sequence[Interpreter], minor: str) -> Interpreter:
    """Return the interpreter of a minor version ("3.12"), or the first one without a wish.

    Raises:
        UsageError: it is not installed, or the wheel does not allow it.
    """
    chosen = next((one for one in found if minor in {"", "{}.{}".format(*one.version.release)}), None)
    if chosen is None:
        there = ", ".join(str(one.version) for one in found)
        raise UsageError(
            f"Python {minor} is not installed, or the wheel does not allow it (there is: {there or 'none'})",
            fix=f"install it, for example with `uv python install {minor}`, or name another with --python",
        )
    return chosen


def full_check(ws: Workspace, path: Path, recipe: Recipe, report: Report, minor: str = "") -> None:
    """Install the wheel with the exact dependencies of its metadata, import it and ask ``vllm.dsa.info()``.

    ``minor`` is the Python to do it on ("3.12"), by default the one that runs this.

    Raises:
        UsageError: that Python is not there.
        CheckFailed: a dependency does not install or does not fit, or the import says something else.
    """
    with scratch.folder(ws, "full") as folder:
        uv = Uv(find_uv(ws))
        found = choose(uv.interpreters(requires_python(path)), minor)
        python = uv.venv(folder / "env", found.path)
        say(
            f"full check: installing torch {recipe.pin.torch} and the dependencies (several GB) "
            f"on Python {found.version}"
        )
        uv.install(python, path, f"torch=={recipe.pin.torch}")
        uv.run("pip", "check", "--python", python)
        # Without a GPU vLLM finds no platform by itself; naming one lets the import go through anywhere.
        env = _plain_env() | {"VLLM_TARGET_DEVICE": "cpu", "HOME": str(folder)}
        done = subprocess.run(
            [python, "-c", _FULL_PROBE], capture_output=True, text=True, env=env, cwd=folder, check=False
        )
        answers = [
            line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")
        ]
        if done.returncode or not answers:
            tail = "\n".join(done.stderr.strip().splitlines()[-15:])
            raise CheckFailed(f"`import vllm` failed:\n{tail}")
        answer = json.loads(answers[0])
        if (
            answer["version"] != recipe.pin.wheel_version
            or answer["info"]["version"] != recipe.pin.wheel_version
        ):
            raise CheckFailed(f"vllm.__version__ is {answer['version']}, expected {recipe.pin.wheel_version}")
        report.full, report.full_python = answer["info"], str(found.version)
        say(
            f"full check: on Python {found.version} import vllm gives {answer['version']}, "
            "vllm.dsa.info() answers"
        )


def _plain_env() -> dict[str, str]:
    """The environment without what would let other packages or settings in."""
    dropped = ("PYTHON", "VIRTUAL_ENV", "VLLM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def check(ws: Workspace, built: repack.Built, recipe: Recipe, *, full: bool, python: str = "") -> Report:
    """Run all checks on a built wheel, unless this very file passed them before on the same Pythons.

    Raises:
        CheckFailed: the first one that fails.
    """
    note = ws.work / "wheel" / f"{built.path.name}.checked.json"
    key = _check_key(ws, built)
    known = _noted(note, key)
    wanted = choose(_pythons(ws, built.path), python) if full else None
    if known and (wanted is None or known.full_python == str(wanted.version)):
        say(
            f"check: passed before on Python {', '.join(one.python for one in known.installs)}, nothing to do"
        )
        return known
    report = Report(members=check_archive(built.path))
    check_contents(built.path)
    check_installs(ws, built.path, recipe, report)
    if full:
        full_check(ws, built.path, recipe, report, python)
    write_atomic(note, json.dumps({"key": key, "report": report.as_dict()}) + "\n")
    return report


def _check_key(ws: Workspace, built: repack.Built) -> str:
    """A digest of the file, of the checks' own code and of the Pythons that they use."""
    digest = hashlib.sha256(built.sha256.encode())
    for module in (Path(__file__), _PROBE):
        digest.update(module.read_bytes())
    for found in _pythons(ws, built.path):
        digest.update(f"{found.version} {found.path}\n".encode())
    return digest.hexdigest()


def _pythons(ws: Workspace, wheel: Path) -> list[Interpreter]:
    return Uv(find_uv(ws)).interpreters(requires_python(wheel))


def _noted(note: Path, key: str) -> Report | None:
    """The report of an earlier run with the same key."""
    try:
        found = json.loads(note.read_text())
        if found["key"] != key:
            return None
        report = Report(**found["report"])
        report.installs = [Installed(**one) for one in found["report"]["installs"]]
        return report
    except (OSError, ValueError, KeyError, TypeError):
        return None
