# SPDX-License-Identifier: Apache-2.0
"""fused_q without a GPU: both kernels in Triton's interpreter, the decision, the hook in upstream."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.dsa import counters, features
from vllm.dsa.features import State
from vllm.dsa.fused_q import feature
from vllm.dsa.fused_q.feature import FEATURE, hooked

TREE = Path(vllm.__file__).parents[1]
KERNELS = "vllm.models.deepseek_v32.common.kernels"
HOOKED = "try_launch" in Path(importlib.util.find_spec(KERNELS).origin).read_text()
needs_hook = pytest.mark.skipif(not HOOKED, reason="this line has no hook in fused_q")


def child(*arguments: str, **variables: str) -> str:
    """Run Python on this tree; an empty CUDA_VISIBLE_DEVICES lets vLLM import Triton without a driver."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_DSA")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(TREE), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, cwd=TREE)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@needs_hook
def test_both_kernels_write_the_same_bytes_in_the_interpreter():
    script = Path(__file__).with_name("fused_q_interpreted.py")
    out = child(str(script), TRITON_INTERPRET="1")
    rows = [json.loads(row) for row in out.splitlines() if row.startswith("{")]
    modes = {(r["interleave"], r["fp8_query"], r["has_indexer"]) for r in rows}
    assert sum("index_alone" in row for row in rows) > 16
    assert len(modes) == 6 and {r["kind"] for r in rows} == {"random", "zeros", "huge", "tiny"}
    for row in rows:
        assert set(row["differ"]) == ({"index_q", "weights", "mqa_q"} if row["has_indexer"] else {"mqa_q"})
        assert not any(row["differ"].values()), row
        assert row.get("index_alone", 0) == 0, row
        if row["kind"] != "huge":
            assert set(row["from_reference"]) == set(row["differ"]), row
            assert all(distance <= 1e-6 for distance in row["from_reference"].values()), row


HOOK = """
import sys, torch
from types import SimpleNamespace
import vllm.models.deepseek_v32.common.kernels as K

class Launched(Exception):
    pass

class Kernel:
    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            raise Launched
        return launch

K._fused_q_kernel = Kernel()
bf16 = dict(dtype=torch.bfloat16)
x = dict(positions=torch.zeros(4, dtype=torch.int64), q_pe=torch.zeros(4, 2, 64, **bf16),
         q_pe_cos_sin_cache=torch.zeros(8, 64), index_q=torch.zeros(4, 2, 128, **bf16),
         index_q_cos_sin_cache=torch.zeros(8, 64), ql_nope=torch.zeros(4, 2, 128, **bf16),
         q_scale=torch.ones(1), index_weights=torch.zeros(4, 2),
         index_weights_softmax_scale=1.0, index_weights_head_scale=1.0,
         quantize_mqa=False)
try:
    K.fused_q(**x)
except Launched:
    ours = [m for m in sys.modules if m.startswith("vllm.dsa")]
    print("upstream", "vllm.dsa.fused_q.launch" in ours, bool(ours))
"""


@needs_hook
@pytest.mark.parametrize("switch", [{"VLLM_DSA": "0"}, {"VLLM_DSA_FUSED_Q": "off"}])
def test_switched_off_upstreams_kernel_is_launched_and_nothing_imported(switch: dict[str, str]):
    assert child("-c", HOOK, **switch).split()[-3:] == ["upstream", "False", "False"]


@needs_hook
def test_without_an_nvidia_gpu_upstreams_kernel_is_launched():
    assert child("-c", HOOK).split()[-3:] == ["upstream", "True", "True"]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch):
    """The module, as if this were a CUDA platform; launches are recorded instead of made."""
    from vllm.dsa.fused_q import launch

    platform = SimpleNamespace(is_cuda=lambda: True, is_arch_support_pdl=lambda: True)
    monkeypatch.setattr(launch, "current_platform", platform)
    monkeypatch.setattr(launch, "_reported", False)
    calls: list[dict] = []
    monkeypatch.setattr(launch, "launch", lambda *args, **kwargs: calls.append(kwargs))
    launch.calls = calls
    return launch


def arguments(
    tokens=8,
    rope=64,
    index_dim=128,
    index_rope=64,
    dtype=torch.bfloat16,
    index_dtype=torch.bfloat16,
    nope=128,
    has_indexer=True,
    quantize=False,
):
    return (
        [
            torch.zeros(tokens, dtype=torch.int64),
            torch.zeros(tokens, 2, rope, dtype=dtype),
            torch.zeros(4, rope),
            torch.zeros(tokens, 2, nope, dtype=dtype),
            torch.ones(1),
            torch.zeros(tokens, 2, rope, dtype=dtype),
            torch.zeros(tokens, 4, index_dim, dtype=index_dtype),
            torch.zeros(4, index_rope),
            torch.zeros(tokens, 4),
            0.1,
            0.2,
            torch.zeros(tokens, 4, index_dim, dtype=torch.float8_e4m3fn),
            torch.zeros(tokens, 4),
        ],
        {"has_indexer": has_indexer, "index_rope_interleave": False, "quantize_mqa": quantize},
    )


def test_with_an_indexer_every_token_count_is_taken_and_said_once(launch):
    for tokens in (1, 3, 4096):
        args, options = arguments(tokens)
        assert launch.try_launch(*args, **options)
    assert len(launch.calls) == 3 and launch.calls[0]["use_pdl"]
    status = features.status(FEATURE)
    assert status.state is State.ACTIVE


def test_another_platform_is_declined_without_a_line_per_worker(launch, monkeypatch, caplog_vllm):
    monkeypatch.setattr(launch, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    args, options = arguments()
    assert not launch.try_launch(*args, **options)
    assert not launch.calls and not caplog_vllm.records and not counters.snapshot("fused_q")


@pytest.mark.parametrize("tokens", [1, 63, 64, 4096])
def test_without_an_indexer_small_batches_stay_with_upstream(launch, tokens: int):
    args, options = arguments(tokens, has_indexer=False)
    assert launch.try_launch(*args, **options) is (tokens >= 64)
    assert not [row for row in counters.snapshot("fused_q") if row["outcome"] == "declined"]


@pytest.mark.parametrize(
    "odd, said",
    [
        ({"rope": 48}, "rotary dimension 48"),
        ({"rope": 2}, "rotary dimension 2"),
        ({"dtype": torch.float16}, "query of torch.float16"),
        ({"nope": 2048, "quantize": True}, "latent dimension 2048"),
        ({"index_dim": 192}, "indexer head of 192"),
        ({"index_rope": 16}, "indexer head of 128 with rotary dimension 16"),
        ({"index_dtype": torch.float32}, "indexer query of torch.float32"),
    ],
)
def test_shapes_that_are_not_covered_decline_with_the_reason(launch, odd: dict, said: str):
    args, options = arguments(**odd)
    assert not launch.try_launch(*args, **options)
    assert not launch.calls
    status = features.status(FEATURE)
    assert status.state is State.DECLINED and said in status.reason


def test_a_line_without_the_hook_does_not_claim_the_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert hooked()
    (tmp_path / "deepseek_v2.py").write_text("# upstream's file\n")
    monkeypatch.setattr(feature, "hooked", lambda: hooked((tmp_path / "deepseek_v2.py", tmp_path / "none")))
    assert str(features.status(FEATURE)) == "unavailable (this line does not call it)"


@pytest.mark.skipif(HOOKED, reason="auto is on on this line")
def test_auto_acts_as_off_until_the_line_gains_enough(monkeypatch: pytest.MonkeyPatch):
    assert features.status(FEATURE).state is State.OFF
    assert features.status(FEATURE).reason.startswith("auto acts as off")
    monkeypatch.setattr(feature, "COMPILED_IS_WORTH_IT", True)
    assert features.status(FEATURE).state is not State.OFF
    monkeypatch.setattr(feature, "COMPILED_IS_WORTH_IT", False)
    monkeypatch.setenv("VLLM_DSA_FUSED_Q", "on")
    assert features.status(FEATURE).state is not State.OFF


def test_off_says_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_DSA_FUSED_Q", "off")
    assert str(features.status(FEATURE)) == "off (VLLM_DSA_FUSED_Q=off)"


def test_token_counts_are_not_specialised():
    """A new batch size must not compile a new kernel in the middle of serving."""
    out = child(
        "-c",
        "from vllm.dsa.fused_q import kernel, index_kernel\n"
        "for k in (kernel.fused_q_block_kernel, index_kernel.index_q_rope_quant_kernel):\n"
        "    print(*[p.name for p in k.params if p.do_not_specialize])",
    )
    assert out.splitlines()[-2:] == ["num_tokens index_blocks pe_blocks", "num_tokens"]
