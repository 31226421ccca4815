# SPDX-License-Identifier: Apache-2.0
"""Brings the LiteDSA kernels up on a card, from the smallest part on; says what a wrong result looks like.

    litedsa_bringup.py [--library _dsa_C.so] [--device cuda|cpu] [--only STAGE,...]

With an installed vLLM it takes that one's vllm.dsa; with `--library` the overlay of this checkout and that
library, so that torch is all it needs. Each stage runs in a process of its own with a time limit, because a
kernel whose barriers are wrong never ends. `--device cpu` runs stages on the reference, to try this script.

Stages: unions; entries (which cache row an output comes from); columns (where each value column goes);
dims (which element of a key each element of a query meets); masks; tiles (more entries than two); check (the
self-check, all heads and formats); repeat (equal results on 30 runs of a large case); time (a first look).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 90
HEADS = 16
ROWS = 512


def load(library: str | None) -> None:
    """Make ``vllm.dsa`` importable: the installed one, or the overlay with a given library."""
    if library is None:
        return
    package = types.ModuleType("vllm")
    package.__path__ = [str(ROOT / "overlay" / "vllm")]
    sys.modules["vllm"] = package
    from vllm.dsa import kernels

    kernels._loaded = kernels.open_library(Path(library).resolve())
    if isinstance(kernels._loaded, str):
        raise SystemExit(kernels._loaded)


def attend(
    q: torch.Tensor, kv: torch.Tensor, topk: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on one group or more: ``q [tokens, heads, 576]``, ``kv [rows, 576]``, ``topk [tokens, k]``."""
    from vllm.dsa.litedsa import kernel, plan

    starts = plan.group_starts([0, q.shape[0]], q.shape[1])
    start = torch.tensor(starts, dtype=torch.int32, device=q.device)
    out = torch.full((*q.shape[:2], 512), torch.nan, dtype=torch.bfloat16, device=q.device)
    lse = torch.full(q.shape[:2], torch.nan, device=q.device)
    kernel.litedsa(q[..., :512], q[..., 512:], kv, topk, start, plan.span_of(kv.shape[0]), scale, out, lse)
    return out.float().cpu(), lse.cpu()


def zeros(tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    bf16 = torch.bfloat16
    return (
        torch.zeros(tokens, HEADS, 576, dtype=bf16, device=device),
        torch.zeros(ROWS, 576, dtype=bf16, device=device),
    )


def differences(found: torch.Tensor, wanted: torch.Tensor, what: str, most: int = 12) -> int:
    """Print where a list of numbers differs; return in how many places."""
    wrong = torch.nonzero(~(found == wanted)).flatten().tolist()
    for i in wrong[:most]:
        print(f"    {what} {i}: found {float(found[i]):g}, wanted {float(wanted[i]):g}")
    if wrong:
        print(f"    {len(wrong)} of {found.numel()} differ; first {wrong[0]}, last {wrong[-1]}")
    return len(wrong)


def unions(device: str) -> bool:
    from vllm.dsa.litedsa import kernel, plan, selfcheck

    good = True
    for heads in plan.HEADS:
        for k in (1, 64, 300, 2048):
            _, _, kv, topk, start, starts, rows = selfcheck.case(heads, k, False, 0, device)
            found = kernel.Unions.empty(len(starts) - 1, heads, k, device)
            kernel.build_unions(topk, start, heads, plan.span_of(2 * k + 200), kv.shape[0], rows, found)
            wrong = selfcheck.check_unions(found, topk, starts, rows)
            print(f"    heads {heads} k {k}: {wrong or 'equal'}")
            good &= not wrong
    return good


def entries(device: str) -> bool:
    """Each query has one key, whose values all are its number: the output is the number."""
    q, kv = zeros(4, device)
    kv[:, :512] = torch.arange(ROWS, device=device).to(torch.bfloat16)[:, None] % 256
    wrong = 0
    for first in range(0, 256, 4):
        topk = torch.arange(first, first + 4, dtype=torch.int32, device=device)[:, None]
        out, lse = attend(q, kv, topk)
        wanted = torch.arange(first, first + 4).float()
        for token in range(4):
            column = out[token].unique()
            if column.numel() != 1 or float(column[0]) != float(wanted[token]):
                wrong += 1
                if wrong < 9:
                    print(f"    key {first + token}: outputs {column[:6].tolist()}")
        wrong += int((lse != 0).sum())
    return wrong == 0


def columns(device: str) -> bool:
    """All keys have the values 0, 1, 2 ... in two ways: an output column names the column it came from."""
    good = True
    for name, code in (("column % 64", lambda c: c % 64), ("column / 64", lambda c: c // 64)):
        q, kv = zeros(4, device)
        kv[:, :512] = code(torch.arange(512, device=device)).to(torch.bfloat16)
        topk = torch.arange(64, dtype=torch.int32, device=device).expand(4, 64).contiguous()
        out, _ = attend(q, kv, topk)
        wanted = code(torch.arange(512)).float()
        for row in (0, 15, 16, 31, 32, 63):
            if not torch.equal(out.reshape(64, 512)[row], wanted):
                good = False
                print(f"    {name}, row {row}:")
                differences(out.reshape(64, 512)[row], wanted, "column")
    return good


def dims(device: str) -> bool:
    """A query of one element meets a key whose elements are numbered: the log-sum-exp names the element."""
    found = torch.zeros(2, 576)
    for part in range(2):
        for first in range(0, 576, 64):
            q, kv = zeros(4, device)
            number = torch.arange(576, device=device)
            kv[:] = (number % 64 if part == 0 else number // 64).to(torch.bfloat16)
            for row in range(64):
                q[row // HEADS, row % HEADS, first + row] = 1
            topk = torch.full((4, 1), 7, dtype=torch.int32, device=device)
            found[part, first : first + 64] = attend(q, kv, topk)[1].flatten()
    wanted = torch.arange(576)
    wrong = differences(found[0].round(), (wanted % 64).float(), "element (% 64)")
    wrong += differences(found[1].round(), (wanted // 64).float(), "element (/ 64)")
    return wrong == 0


def masks(device: str) -> bool:
    """With all scores 0 the log-sum-exp counts the keys of each query; its output is their mean."""
    g = torch.Generator().manual_seed(0)
    q, kv = zeros(4, device)
    kv[:, 0] = 1
    wrong = 0
    for k in (1, 5, 63, 64, 65, 128, 200):
        topk = torch.full((4, k), -1, dtype=torch.int32)
        for token in range(4):
            n = k if token == 0 else (k * token) // 4
            topk[token, :n] = torch.randperm(ROWS, generator=g)[:n].int()
        out, lse = attend(q, kv, topk.to(device))
        counts = (topk >= 0).sum(1).float()
        print(f"    k {k}: counted {lse.exp().round()[:, 0].tolist()}, wanted {counts.tolist()}")
        wrong += int((lse.exp().round() != counts[:, None]).sum())
        wrong += int((out[..., 0] != (counts > 0).float()[:, None]).sum())
    return wrong == 0


def tiles(device: str) -> bool:
    """1 to 9 tiles of random keys against float64, error by tile count and by block of 64 columns."""
    from vllm.dsa.litedsa import reference

    good = True
    g = torch.Generator().manual_seed(1)
    for n in (1, 2, 3, 4, 5, 9):
        q = torch.randn(4, HEADS, 576, generator=g).to(torch.bfloat16)
        kv = torch.randn(1024, 576, generator=g).to(torch.bfloat16)
        same = torch.randperm(1024, generator=g)[: 64 * n].int()
        topk = same.expand(4, -1).contiguous()
        value, total = reference.attend(q, kv, topk, 0.05)
        out, lse = attend(q.to(device), kv.to(device), topk.to(device), 0.05)
        blocks = (out - value).reshape(64, 8, 64).norm(dim=(0, 2)) / value.reshape(64, 8, 64).norm(dim=(0, 2))
        off = float((lse - total).abs().max())
        fine = bool((blocks <= 5e-3).all()) and off <= 1e-4
        good &= fine
        errors = " ".join(f"{float(b):.1e}" for b in blocks)
        print(f"    {n} tiles: log-sum-exp {off:.1e}, blocks {errors}")
    return good


def check(device: str) -> bool:
    from vllm.dsa.litedsa import plan, selfcheck

    found = [
        selfcheck.check(device, heads, k, fp8)
        for heads in plan.HEADS
        for k in (16, 300)
        for fp8 in (False, True)
    ]
    for wrong in filter(None, found):
        print(f"    {wrong}")
    return not any(found)


def large(heads: int, tokens: int, device: str) -> tuple[Any, ...]:
    """Arguments of the op: 131072 keys, K 2048, unions of 1.5 K."""
    from vllm.dsa.litedsa import plan

    g = torch.Generator(device).manual_seed(2)
    q = torch.randn(tokens, heads, 576, device=device, generator=g, dtype=torch.bfloat16)
    kv = torch.randn(1 << 17, 576, device=device, generator=g, dtype=torch.bfloat16)
    group = plan.group_size(heads)
    first = torch.randint(0, 1 << 17, (-(-tokens // group), 1, 1), device=device, generator=g)
    window = torch.arange(group, device=device)[:, None] * (1024 // (group - 1)) + torch.arange(
        2048, device=device
    )
    topk = ((first + 37 * window) % (1 << 17)).reshape(-1, 2048)[:tokens].int().contiguous()
    start = torch.tensor(plan.group_starts([0, tokens], heads), dtype=torch.int32, device=device)
    out = torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device=device)
    return q[..., :512], q[..., 512:], kv, topk, start, 1 << 17, 0.05, out


def repeat(device: str) -> bool:
    from vllm.dsa.litedsa import kernel

    for heads in (8, 16, 32):
        arguments = large(heads, 2048 if device == "cuda" else 8, device)
        kernel.litedsa(*arguments)
        first = arguments[-1].clone()
        if bool(first.isnan().any()):
            print(f"    heads {heads}: NaN")
            return False
        for run in range(30 if device == "cuda" else 1):
            arguments[-1].fill_(torch.nan)
            kernel.litedsa(*arguments)
            if not torch.equal(arguments[-1], first):
                print(f"    heads {heads}: run {run} differs: a race")
                return False
    return True


def timing(device: str) -> bool:
    from vllm.dsa.litedsa import kernel

    if device != "cuda":
        return True
    for heads in (8, 16, 32):
        arguments = large(heads, 16384, device)
        kernel.litedsa(*arguments)
        torch.cuda.synchronize()
        found = []
        for _ in range(9):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            kernel.litedsa(*arguments)
            stop.record()
            stop.synchronize()
            found.append(start.elapsed_time(stop))
        print(f"    heads {heads}, 16384 tokens, K 2048, u 1.5: {sorted(found)[4]:.3f} ms (a first look)")
    return True


STAGES: dict[str, Callable[[str], bool]] = {
    "unions": unions,
    "entries": entries,
    "columns": columns,
    "dims": dims,
    "masks": masks,
    "tiles": tiles,
    "check": check,
    "repeat": repeat,
    "time": timing,
}
#: Stages that call the CUDA kernels one by one, which the op's CPU implementation does not stand for.
CUDA_ONLY = ("unions", "check")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default=",".join(STAGES))
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        load(args.library)
        return 0 if STAGES[args.stage](args.device) else 1
    failed = []
    for name in args.only.split(","):
        if args.device == "cpu" and name in CUDA_ONLY:
            continue
        command = [sys.executable, __file__, "--stage", name, "--device", args.device]
        command += ["--library", args.library] if args.library else []
        begun = time.monotonic()
        try:
            done = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True)
            said, code = done.stdout + done.stderr[-2000:], done.returncode
        except subprocess.TimeoutExpired as stopped:
            said, code = str(stopped.stdout or b"", "utf-8") + f"    did not end in {SECONDS} s\n", 1
        print(
            f"{name}: {'ok' if code == 0 else 'WRONG'} ({time.monotonic() - begun:.1f} s)\n{said}", flush=True
        )
        if code:
            failed.append(name)
    print(
        "all stages are right"
        if not failed
        else f"wrong: {', '.join(failed)}; the first one is the one to mend"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
