# SPDX-License-Identifier: Apache-2.0
"""The start-up line on the real EngineCore.__init__; VLLM_DSA=0 imports nothing of vllm.dsa."""

import os
import subprocess
import sys

# Goes through the real constructor up to the point where the model would be loaded.
ENGINE_CORE = """
import importlib, os, sys
from tests.dsa.conftest import configure_logging
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore

configure_logging()

class Stop(Exception):
    pass

def executor(vllm_config):
    raise Stop

def start():
    try:
        EngineCore(VllmConfig(), executor, log_stats=False)
    except Stop:
        return
    raise SystemExit("EngineCore never reached its executor")
"""

MODULES = """
print("MODULES", sorted(name for name in sys.modules if name.startswith("vllm.dsa")))
"""

# What a DSA model runs, on either line; a module that this line or this machine lacks is left out.
MODEL_CODE = """
done = []
for name in (
    "vllm.engine.arg_utils",
    "vllm.compilation.backends",
    "vllm.compilation.cuda_graph",
    "vllm.model_executor.layers.mla",
    "vllm.model_executor.layers.sparse_attn_indexer",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.deepseek_mtp",
    "vllm.models.deepseek_v32.attention",
    "vllm.models.deepseek_v32.common.kernels",
    "vllm.models.deepseek_v32.nvidia.model",
    "vllm.models.deepseek_v32.nvidia.mtp",
    "vllm.v1.attention.backends.mla.indexer",
    "vllm.v1.attention.backends.mla.flashmla_sparse",
    "vllm.utils.deep_gemm",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
):
    try:
        importlib.import_module(name)
    except ImportError as error:
        if str(error.name or "").startswith("vllm.dsa"):
            raise
    else:
        done.append(name)
assert len(done) >= 10, done
"""

WRONG_VALUES = """
for name in ("VLLM_DSA", "VLLM_INDEXER_OVERLAP", "VLLM_LITETOPK"):
    os.environ[name] = "bogus"
    try:
        start()
    except ValueError as error:
        print("ERROR", error)
    del os.environ[name]
os.environ |= {"VLLM_DSA": "0", "VLLM_INDEXER_OVERLAP": "bogus", "VLLM_LITETOPK": "bogus"}
start()
print("STARTED")
"""


def run(code: str, **variables: str) -> str:
    """Run the code in a process of its own; returns all that it printed and logged."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    env |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_TARGET_DEVICE": "cpu"} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if "vllm.dsa " in line]


def test_engine_core_logs_one_line_and_refuses_wrong_values():
    text = run(ENGINE_CORE + "start()\nstart()" + WRONG_VALUES)
    assert text.count("Initializing a V1 LLM engine") == 2 + 3 + 1
    (line,) = lines_of(text)
    assert "INFO" in line and "startup.py" in line
    for name in ("line", "series", "upstream", "overlap", "litetopk", "litedsa", "fused_q", "logits_slab"):
        assert f"{name} " in line
    for name in ("VLLM_DSA", "VLLM_INDEXER_OVERLAP", "VLLM_LITETOPK"):
        assert f"ERROR Invalid value 'bogus' for {name}. Valid options: [" in text
    assert "STARTED" in text


def test_master_switch_off_logs_and_imports_nothing():
    text = run(
        ENGINE_CORE + "start()" + MODEL_CODE + MODULES,
        VLLM_DSA="0",
        VLLM_LITETOPK="1",
        VLLM_INDEXER_OVERLAP="wk",
    )
    assert text.count("Initializing a V1 LLM engine") == 1
    assert lines_of(text) == []
    assert "MODULES []" in text
