# SPDX-License-Identifier: Apache-2.0
"""fused_qkv_a_proj (vLLM PR 21116, upstream since 0.10) loads q_a and kv_a shards in every weight format.

The real layer and the real ``load_weights`` of the model, on CPU; the values say which shard a row came from.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.models import deepseek_v2

HIDDEN, Q_LORA, KV_A, BLOCK, PACK, GROUP = 256, 256, 192, 128, 8, 64


def model_classes():
    """The models whose load_weights knows the fused layer: 0.28.0's, and the hand-written one of 0.33.0."""
    found = [deepseek_v2.DeepseekV2Model]
    try:
        from vllm.models.deepseek_v32.nvidia.model import DeepseekV32Model
    except ImportError:  # needs CUDA packages on some releases
        return found
    return [*found, DeepseekV32Model]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch):
    """No process group is started: this layer is replicated, and the parameters only ask for the rank."""
    from vllm.model_executor import parameter

    for name, value in (("get_tensor_model_parallel_rank", 0), ("get_tensor_model_parallel_world_size", 1)):
        monkeypatch.setattr(parameter, name, lambda value=value: value, raising=False)
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)  # all that the FP8 method asks of it
    with set_current_vllm_config(config):
        yield


class Host(nn.Module):
    """A model of one attention layer with the fused projection."""

    use_mha = False
    num_redundant_experts = 0
    is_fused_shared_expert_enabled = False

    def __init__(self, quant_config) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_routed_experts=1, n_shared_experts=0, num_hidden_layers=1)
        self.config.num_nextn_predict_layers = 0
        self.self_attn = nn.Module()
        self.self_attn.fused_qkv_a_proj = deepseek_v2.DeepSeekV2FusedQkvAProjLinear(
            HIDDEN, [Q_LORA, KV_A], quant_config=quant_config, prefix="self_attn.fused_qkv_a_proj"
        )


def load(
    model_class, host: Host, shards: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Load ``{suffix: (q_a, kv_a)}`` under their checkpoint names; return the fused parameters by suffix."""
    prefix = "self_attn.fused_qkv_a_proj."
    with torch.no_grad():
        for parameter in host.parameters():
            parameter.data.view(torch.uint8).fill_(0x77)  # what is not loaded shows
    names = ("self_attn.q_a_proj.", "self_attn.kv_a_proj_with_mqa.")
    weights = [(name + suffix, pair[i]) for suffix, pair in shards.items() for i, name in enumerate(names)]
    loaded = model_class.load_weights(host, weights)
    assert loaded == {prefix + suffix for suffix in shards}
    fused = dict(host.named_parameters())
    assert set(fused) == {prefix + suffix for suffix in shards}
    return {suffix: fused[prefix + suffix].data for suffix in shards}


def random(*size: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.int32:
        return torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int64).to(dtype)
    return torch.randn(*size).to(dtype)


@pytest.mark.parametrize("model_class", model_classes())
def test_bfloat16(model_class) -> None:
    host = Host(None)
    pair = tuple(random(rows, HIDDEN, dtype=torch.float32) for rows in (Q_LORA, KV_A))
    fused = load(model_class, host, {"weight": pair})["weight"]
    assert fused.shape == (Q_LORA + KV_A, HIDDEN)
    assert torch.equal(fused, torch.cat(pair).to(fused.dtype))


@pytest.mark.parametrize("model_class", model_classes())
def test_block_fp8(model_class, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 x 128 blocks; kv_a has 1.5 of them (4.5 in V3.2), so its last scale covers half a block."""
    from vllm.model_executor.layers.quantization import fp8

    # Which GEMM multiplies is not the question, and none of them runs on every CPU.
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda *_, **__: None)
    host = Host(fp8.Fp8Config(True, "dynamic", weight_block_size=[BLOCK, BLOCK]))
    weights = tuple(random(rows, HIDDEN, dtype=torch.float8_e4m3fn) for rows in (Q_LORA, KV_A))
    blocks = [-(-rows // BLOCK) for rows in (Q_LORA, KV_A)]
    scales = tuple(random(rows, HIDDEN // BLOCK, dtype=torch.float32) for rows in blocks)
    fused = load(model_class, host, {"weight": weights, "weight_scale_inv": scales})
    assert fused["weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(fused["weight"].view(torch.uint8), torch.cat(weights).view(torch.uint8))
    assert torch.equal(fused["weight_scale_inv"], torch.cat(scales))


@pytest.mark.parametrize("model_class", model_classes())
def test_four_bit_awq(model_class) -> None:
    """AWQ packs eight 4-bit columns into an int32, so the shards lie side by side in columns."""
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig, AutoAWQLinearMethod

    class Config(AutoAWQConfig):
        def get_quant_method(self, layer, prefix):
            return AutoAWQLinearMethod(self)  # Marlin, the other one, keeps the same names and shapes

    host = Host(Config(weight_bits=4, group_size=GROUP, zero_point=True, lm_head_quantized=False))
    groups = HIDDEN // GROUP
    shards = {
        "qweight": tuple(random(HIDDEN, n // PACK, dtype=torch.int32) for n in (Q_LORA, KV_A)),
        "qzeros": tuple(random(groups, n // PACK, dtype=torch.int32) for n in (Q_LORA, KV_A)),
        "scales": tuple(random(groups, n, dtype=torch.float32) for n in (Q_LORA, KV_A)),
    }
    fused = load(model_class, host, shards)
    for suffix, pair in shards.items():
        assert torch.equal(fused[suffix], torch.cat(pair, dim=1).to(fused[suffix].dtype)), suffix


def test_the_output_splits_into_the_two_projections() -> None:
    """What attention splits off is q_a(x) and kv_a(x)."""
    host = Host(None)
    pair = tuple(random(rows, HIDDEN, dtype=torch.float32) for rows in (Q_LORA, KV_A))
    load(deepseek_v2.DeepseekV2Model, host, {"weight": pair})
    layer = host.self_attn.fused_qkv_a_proj
    x = random(5, HIDDEN, dtype=layer.weight.dtype)
    out = torch.nn.functional.linear(x, layer.weight)
    q_a, kv_a = out.split([Q_LORA, KV_A], dim=-1)
    assert layer.output_sizes == [Q_LORA, KV_A]
    for got, weight in ((q_a, pair[0]), (kv_a, pair[1])):
        assert got.stride(0) == Q_LORA + KV_A  # slices of one buffer: the norms behind it take strided rows
        torch.testing.assert_close(got, torch.nn.functional.linear(x, weight.to(x.dtype)))
