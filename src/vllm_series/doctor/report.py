"""Asks an environment, and judges: what is there, what each feature would do for each model, what to mend."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from vllm_series import pins
from vllm_series.doctor import inside
from vllm_series.doctor.reach import models
from vllm_series.errors import SeriesError, UsageError
from vllm_series.install import inplace
from vllm_series.install.environment import Environment, look
from vllm_series.pins import Pin
from vllm_series.workspace import Workspace

_INSIDE = Path(__file__).with_name("inside.py")
REACH = "docs/features.md"
ANSWER = 600  # seconds; importing torch and vLLM takes minutes on a slow disk
SERIES_CARDS = ("9.0", "10.0")


def ask(python: Path) -> dict[str, Any]:
    """Run ``inside.py`` on ``python``, from an empty folder, so that no source tree is taken for vLLM.

    Raises:
        UsageError: it does not answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [str(python), "-c", _INSIDE.read_text(encoding="utf-8")],
                cwd=folder, capture_output=True, text=True, timeout=ANSWER, env=dict(os.environ), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"{python} does not answer within {ANSWER} s (it imports torch and vLLM)",
                fix=f"see where it hangs: {python} -X faulthandler -c 'import torch, vllm'",
            ) from None
    answers = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not answers:
        raise UsageError(
            f"{python} does not answer: {done.stderr.strip()[-500:]}", fix="pass another --python"
        )
    found: dict[str, Any] = json.loads(answers[-1])
    return found


def examine(ws: Workspace, python: Path | None) -> dict[str, Any]:
    """Return everything that `series doctor` shows, as one JSON object. ``python`` None: nothing is there."""
    lines = {pins.load_pin(ws, line).version: pins.load_pin(ws, line) for line in pins.lines(ws)}
    if python is None:
        data: dict[str, Any] = {"python": None, "vllm": None, "torch": {"error": "no environment is named"}}
        return data | judge(ws, lines, data)
    env = look(python)
    said = ask(python)
    data = {
        "python": {"path": str(python), "version": said["python"]},
        "vllm": _vllm(env),
        "torch": said["torch"],
        "driver": said["driver"],
        "deepgemm": said.get("deepgemm"),
        "plugins": said["plugins"],
        "dsa": said.get("dsa"),
    }
    return data | judge(ws, lines, data)


def _vllm(env: Environment) -> dict[str, Any] | None:
    at = env.vllm
    if at is None:
        return None
    kind = "source tree" if at.editable else "wheel of this series" if at.ours else "upstream's wheel"
    problem = ""
    try:
        found = inplace.journal(at)
        if found and found["state"] != "installed":
            problem = f"`series install` was interrupted while {found['state']}"
        elif found:
            kind = f"upstream's wheel with the files of {found['version']} laid over"
            edited = inplace.changed_by_hand(at, found)
            problem = f"changed since they were laid over: {', '.join(edited[:3])}" if edited else ""
    except SeriesError as error:
        problem = error.message
    missing = [name for name in ("METADATA", "RECORD") if not (at.dist_info / name).is_file()]
    if missing and at.dist_info.suffix == ".dist-info":
        problem = f"an installer was interrupted: {at.dist_info.name} has no {' and no '.join(missing)}"
    return {
        "version": at.version,
        "upstream": at.upstream,
        "site": str(at.site),
        "kind": kind,
        "problem": problem,
    }


def judge(ws: Workspace, lines: dict[str, Pin], data: dict[str, Any]) -> dict[str, Any]:
    """Return ``line``, ``features``, ``models`` and ``advice`` (problem, fix) from what was found."""
    vllm, dsa = data["vllm"], data.get("dsa") or {}
    pin = lines.get(vllm["upstream"]) if vllm else None
    patched = "features" in dsa
    names = list(models(ws.root)[0].features)
    if patched:
        states = {
            name: {"state": row["state"], "reason": row["reason"]} for name, row in dsa["features"].items()
        }
    else:
        why = "no environment is named" if data["python"] is None else "no vLLM is installed"
        why = dsa.get("error") or "vLLM does not load" if vllm else why
        states = {name: {"state": "unavailable", "reason": why} for name in names}
    line = pin.line if pin else None
    reach = {
        model.name: {name: model.on(line, name) for name in names} if line else {}
        for model in models(ws.root)
    }
    return {
        "series": {version: one.wheel_version for version, one in lines.items()},
        "line": pin.line if pin else None,
        "features": states,
        "models": reach,
        "advice": [{"problem": problem, "fix": fix} for problem, fix in _advice(lines, pin, data, patched)],
    }


def _advice(
    lines: dict[str, Pin], pin: Pin | None, data: dict[str, Any], patched: bool
) -> list[tuple[str, str]]:
    vllm, torch, dsa = data["vllm"], data["torch"], data.get("dsa") or {}
    if vllm is None:
        current = next(iter(lines.values()))
        where = "no environment is named" if data["python"] is None else "no vLLM is installed here"
        fix = f"scripts/build.sh {current.line}, then pip install the wheel in an environment "
        fix += "(or take one that has vLLM), then "
        return [(where, f"{fix}series doctor --python ITS/bin/python")]
    found = []
    if vllm["problem"].startswith("an installer was interrupted"):
        fix = f"pip install --force-reinstall --no-deps vllm=={vllm['upstream']}, then series install"
        return [(vllm["problem"], fix)]
    if vllm["problem"]:
        found.append((vllm["problem"], "series install --undo, then series install again"))
    if pin is None:
        have = ", ".join(lines)
        found.append(
            (f"this series has no line for vLLM {vllm['version']}, only for {have}", "series rebase")
        )
    elif not patched:
        if dsa.get("error") == inside.UPSTREAM:
            found.append((f"{inside.UPSTREAM} is installed", f"series install {pin.line}"))
        elif "error" not in torch:  # else that is why
            found.append(
                (
                    f"vllm.dsa does not load: {dsa.get('error', 'no vllm package')}",
                    f"series install {pin.line}",
                )
            )
    elif dsa.get("version") not in (pin.wheel_version, None):
        found.append(
            (
                f"installed is {dsa.get('version')}, this checkout has {pin.wheel_version}",
                f"series install {pin.line}",
            )
        )
    if "error" in torch:
        found.append((f"torch does not load: {torch['error']}", "install the wheel with its dependencies"))
    else:
        found += _about_cards(pin, torch, dsa, patched)
    found += _about_plugins(vllm, data.get("plugins") or [])
    return found


def _about_cards(
    pin: Pin | None, torch: dict[str, Any], dsa: dict[str, Any], patched: bool
) -> list[tuple[str, str]]:
    found = []
    release = torch["version"].partition("+")[0]
    if pin and release != pin.torch:
        found.append(
            (f"torch is {release}, vLLM {pin.version} pins {pin.torch}", f"pip install torch=={pin.torch}")
        )
    if not torch["cards"]:
        why = "is a CPU build" if not torch["cuda"] else "sees no CUDA device"
        found.append((f"torch {torch['version']} {why}", "use a machine with a Hopper or Blackwell card"))
    for capability in sorted({card["capability"] for card in torch["cards"]} - set(SERIES_CARDS)):
        found.append((f"no kernel of this series is built for compute capability {capability}", "none"))
    kernels = dsa.get("kernels") or {}
    if patched and not kernels.get("loaded"):
        found.append((f"kernels: {kernels.get('reason')}", "install a wheel with kernels: scripts/build.sh"))
    return found


def _about_plugins(vllm: dict[str, Any], plugins: list[dict[str, str]]) -> list[tuple[str, str]]:
    found = []
    for row in plugins:
        try:
            fits = Requirement(row["requires"]).specifier.contains(vllm["version"], prereleases=True)
        except InvalidRequirement:
            continue
        if not fits:
            found.append(
                (
                    f"{row['name']} requires {row['requires']}, installed is {vllm['version']}",
                    "docs/operations.md",
                )
            )
    return found
