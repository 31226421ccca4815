"""bench/fused_q_engine.py and bench/gpu_clock.py, as far as they run without an engine."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("fused_q_engine")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_clock")


def test_shapes(bench: ModuleType) -> None:
    args = bench.parse(["--shape", "16/64", "--shape", "8/32"])
    assert args.shape == [(16, 64), (8, 32)] and args.runs == 9
    for wrong in ("16", "16/", "a/b", "16-64"):
        with pytest.raises(argparse.ArgumentTypeError):
            bench.shape(wrong)


def test_kernels_by_kind(bench: ModuleType) -> None:
    kernels = [
        ("_fused_q_kernel", 24, 80.0),
        ("fused_q_block_kernel", 24, 3.0),
        ("_fused_norm_rope_kernel", 24, 2.0),
        ("void deep_gemm::sm90_fp8_mqa_logits<64>", 100, 400.0),
        ("void vllm::topKPerRowPrefill<1024>", 100, 70.0),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<TiledCopy, Gemm>>", 24, 150.0),
        ("nvjet_tst_128x256_64x4", 50, 90.0),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", 8, 0.5),
        ("something_new", 1, 0.25),
    ]
    assert bench.by_kind(kernels) == {
        "all": 795.75,
        "query packing": 83.0,
        "norm, rotation, cache": 2.0,
        "MQA logits": 400.0,
        "top-k": 70.0,
        "attention": 150.0,
        "matrix products": 90.0,
        "copies": 0.5,
        "other": 0.25,
    }


def sampled(clock: float) -> dict[str, float]:
    return {"clock": clock, "power": 600.0, "samples": 9, "power cap": 0.5, "temperature": 0.0}


def measured(seconds: list[float], packing: float, clock: float) -> dict:
    kernels = [("_fused_q_kernel", 24, packing), ("mqa_logits", 24, 400.0)]
    return {"seconds": seconds, "answers": [], "clock": sampled(clock), "profiles": [kernels, kernels]}


def test_rows_of_pairs_clock_and_kernels(bench: ModuleType) -> None:
    result = {
        "A": measured([1.1, 1.0, 1.0], 80.0, 1700.0),
        "B": measured([1.0, 1.0, 0.8], 4.0, 1600.0),
    }
    like = {"case": "e2e", "metric": "prefill", "runs": 3, "baseline_seconds": [1.0], "ours_seconds": [1.0]}
    rows = {row["metric"]: row for row in bench.extra_rows(like, result)}
    pairs = rows["prefill, median of pairs"]
    assert (pairs["least"], pairs["ratio"], pairs["most"]) == pytest.approx((1.0, 1.1, 1.25))
    assert rows["SM clock"]["ratio"] == pytest.approx(1600 / 1700)
    assert rows["held by the power cap"]["ours"] == 0.5 and rows["held by temperature"]["ratio"] == 1.0
    packing = rows["kernels: query packing"]
    assert (packing["baseline"], packing["ours"], packing["ratio"], packing["runs"]) == (80.0, 4.0, 20.0, 2)
    assert rows["kernels: all"]["baseline"] == 480.0
    assert rows["kernels: all"]["ours_kernels"][0][0] == "_fused_q_kernel"
    assert not any("baseline_seconds" in row for row in rows.values())


def test_the_control_compares_off_with_off(bench: ModuleType) -> None:
    result = {"A": {"seconds": [1.0], "answers": [1]}, "B": {}, "C": {"seconds": [2.0], "answers": [3]}}
    control = bench.control_of(result)
    assert control["A"] == {"seconds": [1.0], "answers": [1], "again": [3]}
    assert control["B"] is result["C"]
    like = {"case": "e2e control", "metric": "prefill"}
    (row,) = bench.extra_rows(like, control)  # no profile and no clock: only the pairs
    assert row["ratio"] == 0.5


@pytest.mark.parametrize(("pause", "of"), [(0.0, ""), (1.5, " pause=1.5s")])
def test_rows_keep_the_settings_that_they_were_measured_with(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, pause: float, of: str
) -> None:
    def rows(args: argparse.Namespace, _result: dict) -> list[dict]:
        like = {"case": f"e2e{args.case_suffix}", "runs": 1, "settings": args.sets}
        return [like | {"metric": metric} for metric in ("prefill", "same first tokens", "equal logprobs")]

    monkeypatch.setattr(bench.e2e_prefill, "rows", rows)
    result = {name: {"seconds": [1.0], "answers": []} for name in "ABC"}
    found = {
        row["case"]: [row["settings"][name]["VLLM_DSA_FUSED_Q"] for name in "AB"]
        for row in bench.rows_of(argparse.Namespace(pause=pause), result)
    }
    assert found == {f"e2e{of}": ["off", "on"], f"e2e{of} control=off-against-off": ["off", "off"]}


def test_a_shape_that_has_rows_is_done(bench: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    args = bench.parse(["--shape", "16/64", "--tokens", "4096"])
    assert not bench.done(out, 16, 64, args) and not bench.done(None, 16, 64, args)
    row = {"case": "e2e heads=16 index=64 S=4096", "metric": "prefill"}
    bench.results_file.add(out, "fused_q", "0.33.0", [row], replace=False)
    assert bench.done(out, 16, 64, args) and not bench.done(out, 8, 32, args)
    args.pause = 1.0
    assert not bench.done(out, 16, 64, args)
    assert json.loads(out.read_text())["feature"] == "fused_q"


def test_samples_of_the_clock(clock: ModuleType) -> None:
    text = (
        "2026/11/29 23:50:00.100, 1980, 320.5, 0x0000000000000000\n"
        "2026/11/29 23:50:00.150, 1755, 690.0, 0x0000000000000004\n"
        "2026/11/29 23:50:00.200, 1700, 699.0, 0x0000000000000021\n"
        "2026/11/29 23:50:00.250, [N/A], 699.0, 0x0\n"
        "2026/11/29 23:50:00.270, 1700, 699.0, [N/A]\n"
        "2026/11/29 23:5"
    )
    log = clock.ClockLog()
    log.samples = clock.parse(text)
    assert len(log.samples) == 3
    start = datetime.datetime(2026, 11, 29, 23, 50, 0, 120000).timestamp()
    assert log.within([(start, start + 0.1)]) == {
        "clock": 1727.5,
        "power": 694.5,
        "samples": 2,
        "power cap": 0.5,
        "temperature": 0.5,
    }
    assert log.within([(start + 9, start + 10)]) is None


def test_without_nvidia_smi_there_are_no_samples(clock: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    log = clock.ClockLog()
    assert log.command[log.command.index("-i") + 1] == "3"
    log.command[0] = "/no/such/nvidia-smi"
    with log:
        pass
    assert log.samples == []
