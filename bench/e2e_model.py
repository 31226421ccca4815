# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V3.2-shaped model for engine measurements: real layer widths, few layers, seeded weights."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

# Layer widths of DeepSeek-V3.2; heads, indexer heads and layers are arguments.
WIDTHS: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "intermediate_size": 4096,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_head_dim": 128,
    "index_topk": 2048,
    "vocab_size": 4096,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "num_nextn_predict_layers": 0,
}


def rope(tokens: int) -> dict[str, Any]:
    """Return what a config needs for prompts of ``tokens`` tokens and 1024 more: upstream's rotary table has
    factor times original_max_position_embeddings rows, 163840 in the released model, and is read beyond its
    end without an error of its own."""
    scaling = WIDTHS["rope_scaling"]
    factor = max(scaling["factor"], -(-(tokens + 1024) // scaling["original_max_position_embeddings"]))
    most = factor * scaling["original_max_position_embeddings"]
    return {"rope_scaling": scaling | {"factor": factor}, "max_position_embeddings": most}


def write_config(heads: int, index_heads: int, layers: int, overrides: dict[str, Any]) -> str:
    """Write config.json into a folder and return the folder; all layers are dense.

    The same settings give the same folder: its path is in the key of vLLM's compiled artifacts, so with a
    new one an engine start could not load what an earlier one compiled.
    """
    config = WIDTHS | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "index_n_heads": index_heads,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
    }
    text = json.dumps(config | overrides, sort_keys=True)
    user = os.getuid()
    folder = Path(tempfile.gettempdir(), f"e2e-model-{user}-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / "config.json"
    if not file.is_file() or file.read_text() != text:
        # Other engines may start at the same time.
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as new:
            new.write(text)
        Path(new.name).replace(file)
    return str(folder)


def seed_weights(model: Any, _config: Any = None) -> None:
    """Fill every parameter: matrices normal with deviation 1/sqrt(fan in), norms and scales 1, biases 0.

    Upstream's dummy weights are so small that all hidden states and scores are alike, and what a top-k costs
    depends on its scores. Each parameter has its own seed from its name, so two engines get the same model.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = parameter.data
            if not value.is_floating_point():
                continue
            if value.ndim < 2 or "scale" in name.rsplit(".", 1)[-1]:  # an FP8 weight has a matrix of scales
                value.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator = torch.Generator(device=value.device).manual_seed(zlib.crc32(name.encode()))
            scale = 1.0 if "embed" in name else value.shape[-1] ** -0.5
            drawn = torch.randn(value.shape, device=value.device, dtype=torch.float32, generator=generator)
            value.copy_(drawn.mul_(scale))


def make_engine(
    heads: int, index_heads: int, layers: int, max_len: int, overrides: dict, options: dict
) -> Any:
    """Start vLLM in this process on the seeded model."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda self, model, config: seed_weights(model, config)
    settings = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": max_len,
        "gpu_memory_utilization": 0.8,
        "max_num_seqs": 32,
        "enable_prefix_caching": False,
    }
    return LLM(model=write_config(heads, index_heads, layers, overrides), **(settings | options))
