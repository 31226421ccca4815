"""What the patch of line 0.33.0 adds, compiled against the real torch's stable ABI and called on the CPU.

The pin's source is in no package index, so its kernel is not here: a stand-in fills the logits. Schema,
boxing, the choice of the buffer, the refusals and the function of the shim ``_C.py`` are the patch's lines.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import minimal_tree
import pytest

from vllm_series.deepgemm import patchfile
from vllm_series.envs import torch_env
from vllm_series.workspace import Workspace

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
NAME = "fp8_fp4_mqa_logits_out"

PROGRAM = """
#include <optional>
#include <tuple>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include "mqa_logits_out.hpp"

namespace deep_gemm::attention {{
using Tensor = torch::stable::Tensor;

// for the pin's function, with tiles of 4 queries and 256 keys
static Tensor mqa_logits_to(const std::optional<Tensor>& out,
                            const std::tuple<Tensor, std::optional<Tensor>>& q,
                            const std::tuple<Tensor, Tensor>&, const Tensor&, const Tensor&, const Tensor&,
                            const int& max_seqlen_k, const std::optional<Tensor>& = std::nullopt) {{
    const auto [q_fp, q_sf] = q;
    const auto out_dtype = torch::headeronly::ScalarType::Float;
    const int aligned_seq_len = (static_cast<int>(q_fp.size(0)) + 3) / 4 * 4;
    const int stride_logits = (max_seqlen_k + 255) / 256 * 256;
{choice}
    return torch::stable::fill_(logits, 7.0);
}}
}} // namespace deep_gemm::attention

namespace deep_gemm::torch_registration {{
{function}
        static_cast<int>(max_seqlen_k), schedule_meta);
}}
}} // namespace deep_gemm::torch_registration

STABLE_TORCH_LIBRARY_FRAGMENT(deep_gemm, m) {{
{schema}
}}

STABLE_TORCH_LIBRARY_IMPL(deep_gemm, CPU, m) {{
    using namespace deep_gemm::torch_registration;
{implementation}
}}
"""

CALLS = """
import sys, torch

torch.ops.load_library(sys.argv[1])
_torch_ops = torch.ops.deep_gemm
print(_torch_ops.fp8_fp4_mqa_logits_out.default._schema)
exec(open(sys.argv[2]).read())

whole = torch.zeros(16384)
start = -whole.data_ptr() % 512 // 4 + 512
q, kv, scale = torch.zeros(5, 64, 128), torch.zeros(10, 128), torch.zeros(10)
rest = (torch.zeros(5, 64), torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32), 200)

def call(out):
    try:
        return fp8_fp4_mqa_logits_out((q, None), (kv, scale), *rest, out)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]

for rows, columns in ((7, 256), (8, 512)):
    print(call(whole[start : start + rows * columns].view(rows, columns)))
print(call(whole[start : start + 2048].view(torch.int32).view(8, 256)))
print("written:", int(whole.count_nonzero()))
print(call(whole[start : start + 9 * 256].view(9, 256)))
print("inside:", bool((whole[start : start + 9 * 256] == 7).all()), "written:", int(whole.count_nonzero()))
"""


def between(text: str, first: str, last: str) -> str:
    """Return the text from ``first`` to the end of ``last`` after it."""
    start = text.index(first)
    return text[start : text.index(last, start) + len(last)]


def test_the_patch_s_op_on_the_stable_abi(tmp_path: Path) -> None:
    ws = Workspace(ROOT)
    python = torch_env(ws, "0.33.0")
    one = patchfile.read(ROOT / "patches" / "deepgemm" / "0.33.0.patch")
    tree = minimal_tree.write(one, tmp_path / "src")
    one.apply(tree)
    source = (tree / "csrc/apis/attention.hpp").read_text()
    program = tmp_path / "op.cpp"
    program.write_text(
        PROGRAM.format(
            choice=between(source, "    auto logits = ", "{aligned_seq_len, stride_logits}, out_dtype);"),
            function=between(source, f"static void {NAME}(", "cu_seq_len_k_start, cu_seq_len_k_end,\n"),
            schema=between(source, f'    m.def(\n        "{NAME}(', '-> ()");'),
            implementation=between(source, f'    m.impl("{NAME}"', ";"),
        )
    )
    ask = "import pathlib, torch; print(pathlib.Path(torch.__file__).parent)"
    torch = Path(
        subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    )
    library = tmp_path / "op.so"
    argv = ["g++", "-std=c++20", "-fPIC", "-shared", f"-I{torch / 'include'}", f"-I{tree / 'csrc/apis'}"]
    argv += [str(program), "-o", str(library), f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    subprocess.run(argv, check=True)
    shim = tmp_path / "shim.py"
    shim.write_text(
        between((tree / "deep_gemm/_C.py").read_text(), f"if hasattr(_torch_ops, '{NAME}')", "\n        )\n")
    )
    done = subprocess.run(
        [python, "-c", CALLS, str(library), str(shim)], capture_output=True, text=True, check=True
    )
    said = done.stdout.splitlines()
    assert (
        said[0].startswith(f"deep_gemm::{NAME}(")
        and "Tensor(a!) out" in said[0]
        and said[0].endswith("-> ()")
    )
    needed = f"{NAME}: `out` must be a contiguous float32 tensor of at least [8, 256] (8192 bytes;"
    for line, got in zip(said[1:4], ("is [7, 256]", "is [8, 512]", "has another dtype"), strict=True):
        assert line.startswith(needed) and line.endswith(f"but it {got}")
    assert said[4:] == ["written: 0", "None", "inside: True written: 2304"]
