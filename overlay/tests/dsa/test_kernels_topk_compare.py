# SPDX-License-Identifier: Apache-2.0
"""`topk_compare`: the reference against Python sets anywhere, the kernel against the reference on a GPU."""

import random

import pytest
import torch
from vllm.dsa import kernels
from vllm.dsa.topk_compare import MAX_K, topk_compare, topk_compare_reference


def gpu_reason() -> str:
    """Why the kernel cannot run here, '' if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return kernels.why_not(torch.cuda.get_device_capability())


TOP = (1 << 31) - 1
needs_gpu = pytest.mark.skipif(bool(gpu_reason()), reason=f"kernel cannot run: {gpu_reason()}")


def by_hand(a: list[int], b: list[int], limit: int) -> list[int]:
    """The meaning of the result, one row at a time, without tensors."""
    sets, errors = [], []
    for ids in (a, b):
        seen: set[int] = set()
        wrong, ended = 0, False
        for one in ids:
            if one == -1:
                ended = True
            elif not 0 <= one < limit:
                wrong += 1
            else:
                wrong += ended
                wrong += one in seen
                seen.add(one)
        sets.append(seen)
        errors.append(wrong)
    return [len(sets[0] - sets[1]), len(sets[1] - sets[0]), *errors]


def make_rows(seed: int, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random lists that agree mostly, with every kind of mistake sprinkled in, and the extreme rows."""
    rng = random.Random(seed)
    a, b, limits = [], [], []
    for row in range(rows):
        limit = rng.choice([0, 1, k // 2, k, 3 * k + 1, 1 << 20, TOP])
        valid = rng.sample(range(limit), min(k, limit))
        one = valid + [-1] * (k - len(valid))
        other = one[: len(valid)]
        rng.shuffle(other)
        other += [-1] * (k - len(valid))
        for ids in (one, other):
            for _ in range(rng.choice([0, 0, 1, 5, k])):
                inside, twice = rng.randrange(max(limit, 1)), ids[rng.randrange(k)]
                ids[rng.randrange(k)] = rng.choice([-1, -2, -TOP - 1, limit, TOP, inside, twice])
        if row % 7 == 0:
            other = [(i * 4096) % TOP for i in range(k)]  # few residues of a power of two: full hash chains
        a.append(one)
        b.append(other)
        limits.append(limit)
    return tuple(torch.tensor(x, dtype=torch.int32) for x in (a, b, limits))  # type: ignore[return-value]


@pytest.mark.parametrize("k", [1, 2, 31, 64, 257])
def test_reference_is_what_sets_say(k: int) -> None:
    a, b, limits = make_rows(k, 60, k)
    expected = [by_hand(*row) for row in zip(a.tolist(), b.tolist(), limits.tolist(), strict=True)]
    assert topk_compare_reference(a, b, limits).tolist() == expected
    assert topk_compare(a, b, limits).tolist() == expected  # the op on CPU tensors is the reference
    assert any(any(row) for row in expected) and not all(all(row) for row in expected)


def test_equal_sets_in_other_order_are_equal() -> None:
    a = torch.tensor([[3, 9, 4, -1], [0, 1, 2, 3]], dtype=torch.int32)
    b = torch.tensor([[4, 3, 9, -1], [3, 2, 1, 0]], dtype=torch.int32)
    assert not topk_compare(a, b, torch.tensor([10, 4], dtype=torch.int32)).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(2, 4, dtype=torch.int64)}, "dtype torch.int64"),
        ({"limits": torch.zeros(2, dtype=torch.float32)}, "limits has dtype"),
        ({"b": torch.zeros(2, 5, dtype=torch.int32)}, "shapes must be equal"),
        ({"limits": torch.zeros(3, dtype=torch.int32)}, "limits has 3 rows"),
        ({"limits": torch.zeros(4, dtype=torch.int32)[::2]}, "last dimension of limits has stride 2"),
        ({"a": torch.zeros(4, 2, dtype=torch.int32).T}, "last dimension of a has stride 2"),
        ({"a": torch.zeros(8, dtype=torch.int32)}, "a has 1 dimensions"),
        ({n: torch.zeros(2, MAX_K + 1, dtype=torch.int32) for n in "ab"}, "expected 1 to 2048"),
        ({n: torch.zeros(2, 0, dtype=torch.int32) for n in "ab"}, "k is 0"),
        ({"b": torch.zeros(2, 4, dtype=torch.int32, device="meta")}, "b is on meta"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    good = {"a": torch.zeros(2, 4, dtype=torch.int32), "b": torch.zeros(2, 4, dtype=torch.int32)}
    good["limits"] = torch.zeros(2, dtype=torch.int32)
    topk_compare(**good)
    with pytest.raises(ValueError, match=message):
        topk_compare(**{**good, **change})


def test_op_has_a_fake_and_is_registered_once() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        ids = torch.zeros(5, 8, dtype=torch.int32)
        out = topk_compare(ids, ids, torch.zeros(5, dtype=torch.int32))
        assert (tuple(out.shape), out.dtype) == ((5, 4), torch.int32)
    a, b, limits = make_rows(1, 4, 8)
    torch.library.opcheck(torch.ops.dsa.topk_compare, (a, b, limits))
    compiled = torch.compile(lambda *x: topk_compare(*x) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b, limits), topk_compare_reference(a, b, limits) + 1)
    first = torch.ops.dsa.topk_compare.default
    topk_compare(a, b, limits)
    assert torch.ops.dsa.topk_compare.default is first


@needs_gpu
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (64, 2), (200, 33), (64, 512), (33, 1008), (40, 2048)])
def test_kernel_equals_reference(rows: int, k: int) -> None:
    for seed in range(2):
        a, b, limits = make_rows(1000 * seed + k, rows, k)
        expected = topk_compare_reference(a, b, limits)
        torch.full((rows, 4), -7, dtype=torch.int32, device="cuda")  # freed at once: poison for the result
        assert torch.equal(topk_compare(a.cuda(), b.cuda(), limits.cuda()).cpu(), expected)


@needs_gpu
def test_kernel_takes_strided_rows_no_rows_and_other_streams() -> None:
    a, b, limits = make_rows(5, 50, 96)
    wide = torch.full((50, 200), -9, dtype=torch.int32, device="cuda")
    wide[:, 8:104] = a.cuda()
    expected = topk_compare_reference(a, b, limits)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = topk_compare(wide[:, 8:104], b.cuda(), limits.cuda())
    stream.synchronize()
    assert torch.equal(got.cpu(), expected)
    same = a[:1].cuda().expand(50, 96)  # row stride 0
    got = topk_compare(same, b.cuda(), limits.cuda())
    assert torch.equal(got.cpu(), topk_compare_reference(same.cpu(), b, limits))
    none = a[:0].cuda()
    assert topk_compare(none, none, limits[:0].cuda()).shape == (0, 4)


@needs_gpu
def test_kernel_reaches_rows_beyond_32_bit_offsets() -> None:
    rows, k, stride = 3, 4, (1 << 31) + 16  # elements: row 1 and 2 lie behind 2^33 bytes
    if torch.cuda.mem_get_info()[0] < (2 * stride + 64) * 4 + (1 << 30):
        pytest.skip("needs 18 GB of free device memory")
    store = torch.empty(2 * stride + 64, dtype=torch.int32, device="cuda")
    far = store.as_strided((rows, k), (stride, 1))
    near = torch.arange(rows * k, dtype=torch.int32, device="cuda").view(rows, k)
    far.copy_(near)
    limits = torch.full((rows,), 100, dtype=torch.int32, device="cuda")
    assert not topk_compare(far, near, limits).any()
    far[2, 3] = 99
    assert topk_compare(far, near, limits).tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]


@needs_gpu
def test_kernel_runs_inside_a_cuda_graph() -> None:
    a, b, limits = (x.cuda() for x in make_rows(9, 20, 128))
    topk_compare(a, b, limits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = topk_compare(a, b, limits)
    a.copy_(make_rows(10, 20, 128)[0])
    out.fill_(-7)
    graph.replay()
    assert torch.equal(out, topk_compare_reference(a, b, limits))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernel_runs_on_the_device_of_its_tensors() -> None:
    a, b, limits = make_rows(11, 20, 128)
    with torch.cuda.device(0):
        got = topk_compare(a.to("cuda:1"), b.to("cuda:1"), limits.to("cuda:1"))
    assert got.device.index == 1
    assert torch.equal(got.cpu(), topk_compare_reference(a, b, limits))


@needs_gpu
def test_library_reports_launch_errors_in_words() -> None:
    library = kernels.load()
    assert not isinstance(library, str), library
    p, i32, i64 = kernels.POINTER, kernels.INT32, kernels.INT64
    function = library.function("dsa_topk_compare", p, i64, p, i64, p, i64, i32, p)
    with pytest.raises(kernels.KernelError, match="invalid argument"):
        library.launch(function, torch.device("cuda", 0), 0, 0, 0, 0, 0, 1, 8, 0)
