"""Installs a wheel in place of the vLLM that is there, and puts upstream's back."""

from __future__ import annotations

from pathlib import Path

from vllm_series.errors import CheckFailed, UsageError
from vllm_series.install.environment import Environment, Installed, look
from vllm_series.install.inplace import record_hash, rows_of
from vllm_series.wheel.archive import Source
from vllm_series.wheel.names import WheelName
from vllm_series.wheel.uvtool import Uv


def replace(uv: Uv, env: Environment, wheel: Path) -> Installed:
    """Install ``wheel`` without its dependencies, which the vLLM of the same release has brought.

    Raises:
        UsageError: no vLLM of that release is installed.
        CheckFailed: afterwards a file is not the wheel's.
    """
    name = WheelName.parse(wheel.name)
    release = name.version.partition("+")[0]
    if env.vllm is None:
        raise UsageError(
            f"{env.python} has no vLLM whose dependencies could serve",
            fix=f"install the wheel with its dependencies (several GB): {env.python} -m pip install {wheel}",
        )
    if env.vllm.upstream != release or env.vllm.editable:
        kind = "an editable vLLM" if env.vllm.editable else "vLLM"
        raise UsageError(
            f"{env.python} has {kind} {env.vllm.version}, the wheel is of {release}",
            fix=f"use an environment with vLLM {release}, or install the wheel with its dependencies",
        )
    uv.run("pip", "install", "--python", env.python, "--no-deps", "--force-reinstall", "--offline", wheel)
    found = look(env.python).vllm
    if found is None or found.version != name.version:
        have = found.version if found else "none"
        raise CheckFailed(f"after the install vLLM is {have}, expected {name.version}")
    check(found, wheel, name)
    return found


def check(at: Installed, wheel: Path, name: WheelName) -> None:
    """Compare what lies there with the wheel's RECORD, by hash.

    Raises:
        CheckFailed: names the first files that differ.
    """
    with Source(wheel) as archive:
        wanted = rows_of(archive.read(f"{name.dist_info}/RECORD"))
    wrong = [
        path
        for path, digest, _ in wanted
        if digest
        and not ((at.site / path).is_file() and record_hash((at.site / path).read_bytes()) == digest)
    ]
    if wrong:
        raise CheckFailed(
            f"installed, but not as the wheel's RECORD says: {', '.join(wrong[:5])}", fix="run it again"
        )
