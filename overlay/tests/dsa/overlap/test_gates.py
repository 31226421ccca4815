# SPDX-License-Identifier: Apache-2.0
"""When the overlap of line 0.33.0 must not fork: every gate, on upstream's patched attention module."""

import dataclasses
import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm.dsa
from vllm.dsa import counters, features
from vllm.dsa.overlap import auto, gates, measured
from vllm.dsa.overlap.mode import Mode, Request, requested

ATTENTION = Path(importlib.util.find_spec("vllm.models.deepseek_v32.attention").origin)
if "vllm.dsa.overlap.schedule" not in ATTENTION.read_text():
    pytest.skip("this line does not call vllm.dsa.overlap.schedule", allow_module_level=True)

from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.dsa import provenance  # noqa: E402
from vllm.dsa.overlap import feature, schedule  # noqa: E402
from vllm.models.deepseek_v32 import attention  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ..conftest import configure_logging  # noqa: E402
from .attention_double import SERIAL, SHARED, Model  # noqa: E402

STEPS = [*SERIAL, *SHARED, *SERIAL]


def serial(model: Model, **overrides) -> None:
    """Run once and assert that every step and event is where upstream has it."""
    model.run(passes=1, **overrides)
    assert model.machine.steps() == STEPS
    assert model.machine.aux.clock == {} and not model.machine.violations


def counted(outcome: str) -> dict[str, int]:
    return {row["reason"]: row["count"] for row in counters.snapshot("overlap") if row["outcome"] == outcome}


@pytest.fixture(params=["wk", "full"])
def model(request, monkeypatch):
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", request.param)
    return Model(monkeypatch)


def test_piecewise(model):
    """Also the replay of a breakable graph: its eager parts run with this mode."""
    serial(model, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
    assert counted("serial") == {gates.PIECEWISE: 2}


@pytest.mark.parametrize("capturing", [True, False])
def test_breakable_capture(model, monkeypatch, capturing):
    """Whatever the mode says, and also in an eager part, where no stream is capturing."""

    class Capture:
        _capturing = capturing

        def add_eager(self, function):
            return function()

    monkeypatch.setattr(BreakableCUDAGraphCapture._tls, "active", Capture(), raising=False)
    # vLLM's weak references need its compiled part.
    monkeypatch.setattr("vllm.compilation.breakable_cudagraph._weak_ref_capture_arg", lambda value: value)
    serial(model)
    assert counted("serial") == {gates.BREAKABLE: 2}


def test_profile_run(model):
    model.run(passes=1, attn_metadata=None, slot_mapping={})
    assert model.machine.steps() == [step for step in STEPS if step != "attention"]
    assert model.machine.aux.clock == {} and counted("serial") == {gates.PROFILE_RUN: 2}


def test_microbatches(model):
    context = model.context(5)
    serial(model, attn_metadata=[context.attn_metadata])
    model.machine.log.clear()
    serial(model, ubatch_slices=[slice(0, 2), slice(2, 5)])
    assert counted("serial") == {gates.MICROBATCHES: 4}


@pytest.mark.parametrize(("tokens", "forks"), [(1, True), (6, True), (7, False)])
def test_token_threshold(monkeypatch, tokens, forks):
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "full")
    monkeypatch.setenv("VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD", "6")
    model = Model(monkeypatch)
    model.run(tokens=tokens, passes=1)
    assert (model.machine.aux.clock["aux"] > 0) is forks
    assert (gates.TOO_MANY_TOKENS in counted("serial")) is not forks


def test_no_tokens():
    context = SimpleNamespace(attn_metadata={}, ubatch_slices=None, cudagraph_runtime_mode=CUDAGraphMode.NONE)
    assert gates.forward_reason(context, 0) == gates.NO_TOKENS
    assert gates.forward_reason(context, 1) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill context parallelism"),
        ({"parallel": {"use_ubatching": True}}, "dual batch overlap"),
        ({"parallel": {"enable_dbo": True}}, "dual batch overlap"),
        ({"lora": object()}, "LoRA"),
        ({"cuda": False}, "needs an NVIDIA GPU"),
    ],
)
def test_engine_wide_gates_say_so_once(monkeypatch, caplog, options, reason):
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "full")
    configure_logging()
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        model = Model(monkeypatch, **options)
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert [layer._indexer_overlap for layer in model.layers] == [None] * 3
    lines = [record.getMessage() for record in caplog.records if "overlap" in record.getMessage()]
    assert lines == [f"vllm.dsa overlap: declined ({reason}), upstream's path is used"]
    serial(model)
    assert features.status(features.KNOWN[0]).reason == reason


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"VLLM_INDEXER_OVERLAP": "off"}, "VLLM_INDEXER_OVERLAP=off"),
        ({"VLLM_DISABLE_INDEXER_STREAM": "1"}, "VLLM_DISABLE_INDEXER_STREAM=1"),
        (
            {"VLLM_DISABLE_INDEXER_STREAM": "1", "VLLM_INDEXER_OVERLAP": "full"},
            "VLLM_DISABLE_INDEXER_STREAM=1",
        ),
        ({"VLLM_DSA": "0", "VLLM_INDEXER_OVERLAP": "full"}, "VLLM_DSA=0"),
    ],
)
def test_switched_off(monkeypatch, variables, reason):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert requested() == Request(Mode.OFF, reason)
    model = Model(monkeypatch)
    assert [layer._indexer_overlap for layer in model.layers] == [None] * 3
    serial(model)
    row = vllm.dsa.info()["features"]["overlap"]
    assert (row["state"], row["reason"], row["counters"]) == ("off", reason, [])


def test_the_constructor_asks_only_with_vllm_dsa(monkeypatch):
    """Runs upstream's real constructor; its own layers and base class are replaced."""
    made = []
    monkeypatch.setattr(schedule, "make_overlap", lambda layer, config: made.append(layer) or "overlap")

    def base(self, **kwargs):
        torch.nn.Module.__init__(self)
        self.kv_cache_dtype, self.use_pcp, self.layer_name = "auto", False, kwargs["prefix"]

    for name in ("ColumnParallelLinear", "RowParallelLinear", "DeepSeekV2FusedQkvAProjLinear", "RMSNorm"):
        monkeypatch.setattr(attention, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(attention, "get_rope", lambda *args, **kwargs: None)
    monkeypatch.setattr(attention, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(attention.MLAAttention, "__init__", base)

    class Layer(attention.DeepseekV32Attention):
        indexer_cls = staticmethod(lambda *args, **kwargs: None)
        impl = SimpleNamespace(supports_quant_query_input=False)
        supports_dense_mha_prefill = False

    sizes = {
        "hidden_size": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "q_lora_rank": 4,
    }
    sizes |= {"kv_lora_rank": 4, "num_attention_heads": 2, "rms_norm_eps": 1e-6, "num_hidden_layers": 1}
    config = SimpleNamespace(rope_parameters={"rope_type": "default"}, **sizes)
    engine = SimpleNamespace(quant_config=None, cache_config=None)
    monkeypatch.setenv("VLLM_DSA", "0")
    assert Layer(engine, config, "layers.0.attn")._indexer_overlap is None and made == []
    monkeypatch.setenv("VLLM_DSA", "1")
    layer = Layer(engine, config, "layers.0.attn")
    assert layer._indexer_overlap == "overlap" and made == [layer]
    assert not layer.state_dict()


# --- auto


def test_auto_without_a_measurement_acts_as_off(monkeypatch):
    monkeypatch.setattr(measured, "MEASURED", ())
    model = Model(monkeypatch)
    assert requested().mode is Mode.AUTO
    assert [layer._indexer_overlap for layer in model.layers] == [None] * 3
    serial(model)
    row = vllm.dsa.info()["features"]["overlap"]
    assert row["state"] == "off" and row["reason"] == auto.no_measurement("test")
    assert "no stored measurement" in row["reason"]


def test_auto_takes_a_card_without_a_name_for_unmeasured(monkeypatch):
    class NVMLError(Exception):
        """As pynvml's: no RuntimeError."""

    def refuse(device_id=0):
        raise NVMLError("Invalid Argument")

    model = Model(monkeypatch)  # an NVIDIA card
    monkeypatch.setattr(current_platform, "get_device_name", refuse)
    assert feature.card_here() == ""
    assert schedule.make_overlap(model.layers[0], model.config) is None
    assert features.status(features.KNOWN[0]) == features.Status(features.State.OFF, auto.no_measurement(""))


def test_auto_asks_for_the_card_once(monkeypatch):
    """Not per layer: upstream's call starts and stops NVML."""

    class Platform(type(current_platform)):
        asked = 0

        @classmethod
        def is_cuda(cls):
            return True

        @classmethod
        def get_device_name(cls, device_id=0):
            cls.asked += 1
            return "NVIDIA Other"

    model = Model(monkeypatch)
    monkeypatch.setattr("vllm.platforms.current_platform", Platform())
    for layer in model.layers:
        assert schedule.make_overlap(layer, model.config) is None
    assert feature.card_here() == "other" and Platform.asked == 1


POINTS = ((1, "full"), (4, "full"), (8, "wk"), (16, "off"), (32, "full"))


def entry(graph: str = "FULL", heads: int = 2) -> auto.Entry:
    return auto.Entry(provenance.read().line, "test", heads, 3, graph, POINTS)


CHOICES = [(1, "full"), (3, "full"), (4, "full"), (6, "wk"), (8, "wk"), (9, "off"), (16, "off"), (20, "off")]
CHOICES += [(32, "full"), (33, "off"), (0, "off")]


@pytest.mark.parametrize(("tokens", "mode"), CHOICES)
def test_auto_chooses_by_token_count(tokens, mode):
    assert entry().mode(tokens) is Mode(mode)


def test_auto_acts_as_off_until_an_engine_was_compared(monkeypatch):
    monkeypatch.setattr(measured, "MEASURED", (entry(),))
    monkeypatch.setattr(auto, "CHECKED_IN_ENGINE", frozenset({"another line"}))
    serial(Model(monkeypatch))
    assert "forked" not in {row["outcome"] for row in vllm.dsa.info()["features"]["overlap"]["counters"]}
    assert feature.probe(None) == features.Status(features.State.OFF, auto.NOT_CHECKED)


def test_auto_runs_what_was_measured(monkeypatch):
    monkeypatch.setattr(auto, "CHECKED_IN_ENGINE", frozenset({provenance.read().line}))
    monkeypatch.setattr(measured, "MEASURED", (entry(),))
    model = Model(monkeypatch)
    for tokens in (4, 8, 16):
        model.run(tokens=tokens, passes=1)
    assert counted("forked") == {"full": 2, "wk": 2} and counted("serial") == {"auto": 2}
    row = vllm.dsa.info()["features"]["overlap"]
    assert row["state"] == "active"


def with_model(config: SimpleNamespace, heads: int = 4) -> SimpleNamespace:
    """The configuration of two tensor-parallel ranks with ``heads // 2`` heads each."""
    config.model_config = SimpleNamespace(
        hf_text_config=SimpleNamespace(
            model_type="deepseek_v32", num_attention_heads=heads, index_n_heads=3, index_topk=4
        )
    )
    config.parallel_config.tensor_parallel_size = 2
    return config


@pytest.mark.parametrize("other", [entry(heads=16), entry(graph="NONE")])
def test_auto_takes_no_other_configurations_measurement(monkeypatch, other):
    """And says so at start-up: the feature is off, not active in a mode that never forks."""
    monkeypatch.setattr(auto, "CHECKED_IN_ENGINE", frozenset({provenance.read().line}))
    monkeypatch.setattr(measured, "MEASURED", (other,))
    model = Model(monkeypatch)
    serial(model)
    assert [layer._indexer_overlap for layer in model.layers] == [None] * 3 and not counted("serial")
    overlap = features.KNOWN[0]
    assert features.status(overlap, with_model(model.config)) == features.Status(
        features.State.OFF, auto.no_measurement("test")
    )
    monkeypatch.setattr(measured, "MEASURED", (other, entry()))
    assert features.status(overlap, model.config).state is features.State.ACTIVE
    model.config.model_config.hf_text_config.model_type = "deepseek_v4"  # has an indexer, calls no overlap
    assert features.status(overlap, model.config).state is features.State.OFF
    assert features.status(overlap, with_model(model.config, heads=8)).state is features.State.OFF


def test_auto_stops_where_full_graphs_are_turned_off_after_the_layers_were_built(monkeypatch):
    monkeypatch.setattr(auto, "CHECKED_IN_ENGINE", frozenset({provenance.read().line}))
    monkeypatch.setattr(measured, "MEASURED", (entry(),))
    model = Model(monkeypatch)
    model.config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    serial(model)
    assert counted("serial") == {"auto": 2}


KINDS = {
    "speculative decoding": {"speculative_config": object()},
    "quantised weights": {"quant_config": object()},
    "decode context parallelism": {},
    "a KV cache of fp8_ds_mla": {"cache_config": SimpleNamespace(cache_dtype="fp8_ds_mla")},
    "HiSparse": {"attention_config": SimpleNamespace(hisparse_config=object())},
}


@pytest.mark.parametrize("what", KINDS)
def test_auto_takes_an_engine_of_another_kind_for_unmeasured(monkeypatch, what):
    monkeypatch.setattr(auto, "CHECKED_IN_ENGINE", frozenset({provenance.read().line}))
    monkeypatch.setattr(measured, "MEASURED", (entry(),))
    dcp = {"decode_context_parallel_size": 2} if what == "decode context parallelism" else {}
    model = Model(monkeypatch, parallel=dcp)
    vars(model.config).update(KINDS[what])
    assert feature.probe(model.config) == features.Status(
        features.State.OFF, f"auto acts as off: not measured with {what}"
    )
    assert [schedule.make_overlap(layer, model.config) for layer in model.layers] == [None] * 3
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "full")
    assert schedule.make_overlap(model.layers[0], model.config) is not None


def weights_of(blocks: list[int] | None, scheme: str = "dynamic"):
    """Upstream's configuration of FP8 weights."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    return Fp8Config(activation_scheme=scheme, weight_block_size=blocks)


@pytest.mark.parametrize(
    ("quant", "kind"),
    [
        (lambda: None, ""),
        (lambda: weights_of([128, 128]), "fp8"),
        (lambda: weights_of([64, 128]), None),
        (lambda: weights_of(None), None),
        (lambda: weights_of(None, "static"), None),
        (object, None),
    ],
)
def test_auto_knows_weights_by_kind(monkeypatch, quant, kind):
    """FP8 in blocks of 128 x 128 may have been measured; what is quantised otherwise was not."""
    monkeypatch.setattr(auto, "CHECKED_IN_ENGINE", frozenset({provenance.read().line}))
    model = Model(monkeypatch)
    model.config.quant_config = quant()
    assert auto.weights_kind(model.config) == kind
    for stored in ("", "fp8"):
        monkeypatch.setattr(measured, "MEASURED", (dataclasses.replace(entry(), weights=stored),))
        made = schedule.make_overlap(model.layers[0], model.config)
        assert (made is not None) is (stored == kind)
        said = feature.probe(model.config)
        if kind == stored or kind == "":
            assert said.state is features.State.ACTIVE  # of this model's heads nothing is known here
        else:
            unmeasured = "auto acts as off: not measured with quantised weights"
            assert said == features.Status(features.State.OFF, unmeasured)


def test_auto_forks_by_what_was_measured_with_the_same_weights(monkeypatch):
    monkeypatch.setattr(auto, "CHECKED_IN_ENGINE", frozenset({provenance.read().line}))
    slow = dataclasses.replace(entry(), points=((1, "off"), (16, "wk")))
    monkeypatch.setattr(measured, "MEASURED", (slow, dataclasses.replace(entry(), weights="fp8")))
    model = Model(monkeypatch)
    model.config.quant_config = weights_of([128, 128])
    for layer in model.layers:
        layer._indexer_overlap = schedule.make_overlap(layer, model.config)
    model.run(tokens=4, passes=1)
    assert counted("forked") == {"full": 2}


def test_the_names_of_cards():
    assert auto.card_slug("NVIDIA H200") == "h200"
    assert auto.card_slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"


# --- by layer


KERNELS = [
    ("MarlinFP8ScaledMMLinearKernel", True),
    ("FlashInferFP8ScaledMMLinearKernel", True),
    ("DeepGemmFp8BlockScaledMMKernel", False),
    ("FlashInferFp8DeepGEMMDynamicBlockScaledKernel", False),
    ("CutlassFP8ScaledMMLinearKernel", False),
]


@pytest.mark.parametrize(("kernel", "shared"), KERNELS)
@pytest.mark.parametrize("mode", ["wk", "full"])
def test_a_side_projection_that_shares_scratch_memory_never_forks(monkeypatch, mode, kernel, shared):
    """Upstream leaves wk_weights_proj unquantised; were it not, others would run beside it."""
    import vllm.model_executor.kernels.linear as linear

    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", mode)
    model = Model(monkeypatch, layers=(True,))
    method = SimpleNamespace(fp8_linear=object.__new__(getattr(linear, kernel)))
    model.layers[0].indexer.wk_weights_proj.quant_method = method
    model.run(passes=1)
    if shared:
        reason = f"wk_weights_proj runs {kernel}, which may share scratch memory between streams"
        assert list(counted("declined")) == [f"wk and full: {reason}"]
        assert counted("serial") == {"declined": 1} and not counted("forked")
        assert model.machine.aux.clock == {} and not model.machine.violations
    else:
        assert counted("forked") == {mode: 1}


@pytest.mark.parametrize("kernel", [name for name, _ in KERNELS])
def test_projections_of_the_main_stream_may_share_scratch_memory(monkeypatch, kernel):
    """No two of them run at the same time, in no mode."""
    import vllm.model_executor.kernels.linear as linear

    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "full")
    model = Model(monkeypatch, layers=(True,))
    layer = model.layers[0]
    for projection in (layer.fused_qkv_a_proj, layer.q_b_proj, layer.indexer.wq_b, layer.o_proj):
        method = SimpleNamespace(fp8_linear=object.__new__(getattr(linear, kernel)))
        projection.quant_method = method
    model.run(passes=1)
    assert counted("forked") == {"full": 1} and not counted("declined")


def test_every_name_in_the_list_of_kernels_exists():
    import vllm.model_executor.kernels.linear as linear

    assert [name for name in gates.PRIVATE_SCRATCH if not hasattr(linear, name)] == []


def test_an_unknown_linear_method_on_the_side_never_forks(monkeypatch):
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "full")
    model = Model(monkeypatch, layers=(True,))
    model.layers[0].indexer.wk_weights_proj.quant_method = SimpleNamespace()
    assert gates.layer_reason(model.layers[0]).startswith("wk_weights_proj runs SimpleNamespace")


def test_cards_whose_query_packing_is_one_kernel_keep_full_from_forking(monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "full")
    model = Model(monkeypatch, layers=(True,))
    monkeypatch.setattr(current_platform, "has_device_capability", lambda n: n == 100, raising=False)
    model.run(passes=1)
    assert counted("forked") == {"wk": 1}
