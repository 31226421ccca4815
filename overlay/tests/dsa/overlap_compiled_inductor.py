# SPDX-License-Identifier: Apache-2.0
"""The code that Inductor makes for an H200, without a GPU; here of wk's fork, QKV-A projection and join.

The tensors are fake CUDA tensors, the card is made up of what Inductor asks for, and code generation is
stopped before it would compile a kernel.
"""

import contextlib
import types
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.fx_passes.post_grad as post_grad
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from vllm.dsa.overlap.compiled.layer import LayerOverlap
from vllm.dsa.overlap.mode import Mode

TOKENS, HIDDEN, Q_LORA, KV_A, INDEX_DIM, INDEX_HEADS = 16, 7168, 1536, 576, 128, 64

H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    warp_size=32,
    total_memory=140 << 30,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
    uuid="",
    clock_rate=1980000,
    memory_clock_rate=2619000,
    memory_bus_width=6144,
)


class Driver:
    """What Inductor asks Triton's driver for."""

    utils = types.SimpleNamespace()

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_benchmarker(self):
        return None


def made_up_card():
    """Patches under which torch believes in one H200."""
    properties = lambda *_a, **_k: H200  # noqa: E731
    zero, yes, nothing = (lambda *_a, **_k: 0), (lambda *_a, **_k: True), (lambda *_a, **_k: None)
    for name, value in {
        "is_available": yes,
        "is_initialized": yes,
        "device_count": lambda: 1,
        "current_device": zero,
        "set_device": nothing,
        "synchronize": nothing,
        "get_device_properties": properties,
        "get_device_capability": lambda *_a, **_k: (9, 0),
        "get_device_name": lambda *_a, **_k: H200.name,
        "get_rng_state": lambda *_a, **_k: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": nothing,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": nothing,
        # Dynamo keeps its handlers by function, so each needs one of its own.
        "_exchange_device": lambda _device: 0,
        "_maybe_exchange_device": lambda _device: 0,
        "Event": object,
    }.items():
        yield mock.patch.object(torch.cuda, name, value)
    yield mock.patch.object(torch.cuda.random, "_lazy_init", nothing)
    yield mock.patch.object(torch.accelerator, "is_available", yes)
    yield mock.patch.object(torch._C, "_accelerator_getDeviceIndex", zero)
    current = torch.Stream(stream_id=1, device_index=0, device_type=1)
    yield mock.patch.object(torch._C, "_accelerator_getStream", lambda *_a, **_k: current)
    yield mock.patch.object(torch._C, "_cuda_getDevice", zero, create=True)
    yield mock.patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(properties))
    yield mock.patch.object(CudaInterface.Worker, "current_device", staticmethod(zero))
    yield mock.patch.object(CudaInterface, "get_device_properties", staticmethod(properties))
    yield mock.patch.object(CudaInterface, "is_available", staticmethod(yes))
    yield mock.patch.object(CudaInterface, "current_device", staticmethod(zero), create=True)
    yield mock.patch.object(CudaInterface, "is_triton_capable", staticmethod(yes))
    yield mock.patch.object(CudaInterface, "raise_if_triton_unavailable", staticmethod(nothing))
    yield mock.patch.object(CudaInterface, "get_compute_capability", staticmethod(lambda *_a, **_k: 90))
    for module in (joint_graph, post_grad):
        yield mock.patch.object(module, "lazy_init", nothing)
    yield inductor_config.patch(
        {"fx_graph_cache": False, "compile_threads": 1, "triton.autotune_at_compile_time": False}
    )


class Done(Exception):
    """Raised with the generated code."""


def generated(function, *inputs, prepare=None, whole=False) -> str:
    """The body of the wrapper that Inductor generates for a function of fake CUDA tensors.

    Args:
        function: to compile.
        inputs: of the function.
        prepare: gets the traced graph and a dictionary for Inductor's options; returns a context.
        whole: also what stands before the body, the kernels.
    """
    traced = []

    def keep(graph, example_inputs):
        traced.append((graph, example_inputs))
        return graph.forward

    try:
        torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    except RuntimeError:  # running it needs a card
        if not traced:
            raise
    ((graph, example_inputs),) = traced
    codegen, options = GraphLowering.codegen, {}
    context = contextlib.nullcontext() if prepare is None else prepare(graph, options)

    def stop(self, *args, **kwargs):
        code = codegen(self, *args, **kwargs)[0]
        raise Done(getattr(code, "value", str(code)))

    try:
        with (
            context,
            inductor_config.patch(options),
            mock.patch.object(GraphLowering, "codegen", stop),
            torch._guards.tracing(torch._guards.TracingContext(inputs[0].fake_mode)),
        ):
            compile_fx(graph, example_inputs)
    except Exception as error:
        while not isinstance(error, Done) and error.__cause__ is not None:
            error = error.__cause__
        code = str(error)
        return code[0 if whole else code.index("def call(") : code.index("runner = Runner")]
    raise AssertionError("no code was generated")


def print_wk() -> None:
    """Print the code of norm, fork, QKV-A projection, join and what follows."""
    width = INDEX_DIM + INDEX_HEADS
    overlap = LayerOverlap(
        "model.layers.0.self_attn.dsa_overlap",
        types.SimpleNamespace(weight=torch.empty(width, HIDDEN)),
        None,
        lambda _tokens: Mode.WK,
        whole=False,
        pieces=True,
    )

    def layer(x, residual, gain, weight):
        residual = x + residual
        x = residual.float()
        x = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain).to(torch.bfloat16)
        overlap.fork(x)
        qkv = x @ weight
        kw = overlap.join(x, qkv)
        q, kv = qkv.split([Q_LORA, KV_A], dim=-1)
        k, weights = kw.split([INDEX_DIM, INDEX_HEADS], dim=-1)
        return residual, q * 2, kv + 1, torch.nn.functional.layer_norm(k, (INDEX_DIM,)), weights * 2

    with FakeTensorMode(shape_env=ShapeEnv()):
        like = {"device": "cuda", "dtype": torch.bfloat16}
        x, residual = torch.empty(TOKENS, HIDDEN, **like), torch.empty(TOKENS, HIDDEN, **like)
        gain, weight = torch.empty(HIDDEN, **like), torch.empty(HIDDEN, Q_LORA + KV_A, **like)
    print("CODE")
    print(generated(layer, x, residual, gain, weight))
