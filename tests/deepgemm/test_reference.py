"""The reference patch on its whole source, compiled against the real torch and loaded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from vllm_series.deepgemm import reference
from vllm_series.deepgemm.patchfile import State
from vllm_series.envs import torch_env
from vllm_series.workspace import Workspace

WS = Workspace(Path(__file__).resolve().parents[2])

LOAD = """
import json, torch, deep_gemm
said = {"version": deep_gemm.__version__}
for name in ("fp8_fp4_mqa_logits", "fp8_fp4_mqa_logits_out"):
    said[name] = getattr(deep_gemm._C, name).__doc__.strip()
try:
    deep_gemm._C.fp8_fp4_mqa_logits_out(1, 2)
except TypeError as error:
    said["refused"] = str(error).splitlines()[0]
print(json.dumps(said))
"""


@pytest.mark.slow
def test_the_patch_applies_strictly_to_the_whole_source(tmp_path: Path) -> None:
    patch = reference.unpack(WS, tmp_path)
    assert patch.state(tmp_path) is State.UNPATCHED
    assert patch.apply(tmp_path) and not patch.apply(tmp_path)
    assert "mqa_logits_out.hpp" in (tmp_path / "csrc/apis/attention.hpp").read_text()


@pytest.mark.torch
def test_it_compiles_and_loads(tmp_path: Path) -> None:
    python = torch_env(WS, "0.33.0")
    about = subprocess.run(
        [python, "-c", "import torch; print(torch.version.cuda)"], capture_output=True, text=True, check=True
    )
    if about.stdout.strip() == "None":
        pytest.skip("the torch environment has a CPU build of torch: no CUDA headers to compile against")
    folder = reference.build(WS, python)
    assert reference.build(WS, python) == folder, "built once"
    done = subprocess.run(
        [python, "-c", LOAD],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    said = json.loads(done.stdout)
    own, out = said["fp8_fp4_mqa_logits"], said["fp8_fp4_mqa_logits_out"]
    assert said["version"] == "2.8.2" and "incompatible function arguments" in said["refused"]
    assert own.endswith("schedule_meta: torch.Tensor | None = None) -> torch.Tensor")
    assert out.endswith("out: torch.Tensor, schedule_meta: torch.Tensor | None = None) -> None")
    head = own.split("schedule_meta")[0].removeprefix("fp8_fp4_mqa_logits")
    assert out.startswith(f"fp8_fp4_mqa_logits_out{head}"), "the same arguments before `out`"
