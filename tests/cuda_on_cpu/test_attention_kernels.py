"""The CUDA kernels, run on the CPU, against golden results and dense brute force; memory they leave is NaN."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_on_cpu.build import CSRC, SANITIZED, build, kernel_sources, load, needs_compiler
from golden_cases import NAMES, RESULTS, GoldenCase, largest_relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.test_compiled import Case, check, error, random_tables, run_sanitized, whole
from ops.test_schedule import SMALL_PART, tiles_of

from sfno_dist import Grid, Neighbourhood, spherical_attention
from sfno_dist.ops import Window, attend, compiled_cuda, schedule
from sfno_dist.ops.attend import operands

pytestmark = needs_compiler
LIBRARY_VARIABLE = "CUDA_ON_CPU_LIBRARY"  # of the sanitizers' test
TOLERANCE = {"float32": 2e-6, "tf32": 2e-3, "bfloat16": 1e-2, "float16": 2e-3}
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """The CUDA backend computes on the CPU, and memory that nobody has written is NaN."""
    named = os.environ.get(LIBRARY_VARIABLE)
    library = load(Path(named) if named else build(kernel_sources()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_cuda, "_library", lambda: library)
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        yield library
        torch.use_deterministic_algorithms(before)


@pytest.fixture(params=DTYPES)
def number(request) -> Iterator[str]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param == "tf32"
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(params=[schedule.PART_NEIGHBOURS, SMALL_PART], ids=["whole_tiles", "parts"])
def parts(request, monkeypatch) -> None:
    monkeypatch.setattr(schedule, "PART_NEIGHBOURS", request.param)


class CudaCase(Case):
    def __init__(self, tables, *arguments, **options):
        super().__init__(tables, *arguments, **options)
        self.tiles = tiles_of(tables)

    def run(self, needs=(True, True)):
        y, lse = compiled_cuda.forward(self.q, self.k, self.v, *self.tables, *self.tiles)
        arguments = self.dy, self.dlse, self.q, self.k, self.v, y, lse, *self.tables, *self.tiles, *needs
        return y, lse, *compiled_cuda.backward(*arguments)


# --- results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_golden_results_and_gradients(name, number, parts):
    case = GoldenCase.load(name, DTYPES[number])
    window = Window.whole(Neighbourhood(case.grid_in, case.grid_out, case.theta_cutoff))
    q, k, v = (x.detach().movedim(1, -1).unsqueeze(1).contiguous().requires_grad_() for x in (case.q, case.k, case.v))
    arguments = list(operands(q, k.flatten(2, 3), v.flatten(2, 3), window, "cuda"))
    arguments[10:] = tiles_of((*window.tables(q.device), case.grid_out.nlon, case.grid_in.nlon, 0, q.shape[3]))
    y, _ = torch.ops.sfno_dist.attend(*arguments)
    y.backward(case.dy.movedim(1, -1).unsqueeze(1))
    for key, got in zip(RESULTS, (y, q.grad, k.grad, v.grad), strict=True):
        field = got[:, 0].movedim(-1, 1)
        assert largest_relative_error(field, case.results[key]) < TOLERANCE[number], key


def test_the_public_function_reaches_the_kernels():
    case = GoldenCase.load("up2_12x24", torch.float32)
    grids = case.grid_in, case.grid_out
    y = spherical_attention(case.q, case.k, case.v, *grids, theta_cutoff=case.theta_cutoff, backend="cuda")
    y.backward(case.dy)
    for key, got in zip(RESULTS, (y, case.q.grad, case.k.grad, case.v.grad), strict=True):
        assert largest_relative_error(got, case.results[key]) < TOLERANCE["float32"], key


@settings(deadline=None, max_examples=20 if LIBRARY_VARIABLE in os.environ else 80)
@given(
    random_tables(),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(1, 3),
    st.integers(1, 21),
    st.integers(1, 35),
    st.integers(0, 99),
    st.sampled_from([schedule.PART_NEIGHBOURS, SMALL_PART]),
)
def test_random_windows_equal_brute_force(tables, number, heads, depth, value_depth, seed, part):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "PART_NEIGHBOURS", part)
        dtype = DTYPES[number]
        check(CudaCase(tables, heads, depth, value_depth, scale=0.5, dtype=dtype, seed=seed), dtype)


@pytest.mark.parametrize("widths", [(64, 64), (72, 136), (256, 8), (16, 256)], ids=str)
def test_wide_heads(widths, number, parts):
    tables = whole(Grid("equiangular", 9, 16), Grid("legendre-gauss", 6, 12), 0.5)
    case = CudaCase(tables, 1, *widths, scale=0.1, dtype=DTYPES[number])
    for got, exact in zip(case.run(), case.dense(torch.float64), strict=True):
        assert error(got, exact) < TOLERANCE[number]


@pytest.mark.parametrize(
    ("number", "widths", "kilobytes"),
    [
        *(("float32", (96, 64), kilobytes) for kilobytes in (120, 80, 70)),
        *(("bfloat16", (192, 160), kilobytes) for kilobytes in (120, 80, 70)),
        ("float32", (256, 256), 99),
        ("tf32", (256, 256), 99),
        ("bfloat16", (256, 256), 48),
    ],
    indirect=["number"],
)
def test_devices_with_less_shared_memory_give_the_same(number, widths, kilobytes, monkeypatch):
    """Fewer warps per block, one chunk at a time, half a chunk. No device that can run the kernels has below 99 KiB."""
    tables = whole(Grid("equiangular", 9, 16), Grid("legendre-gauss", 6, 12), 0.5)
    case = CudaCase(tables, 1, *widths, scale=0.1, dtype=DTYPES[number])
    expected = case.run()
    monkeypatch.setenv("CUDA_ON_CPU_SHARED_BYTES", str(kilobytes << 10))
    for got, same in zip(case.run(), expected, strict=True):
        torch.testing.assert_close(got, same, rtol=1e-5, atol=1e-6)


def test_logits_of_600_stay_finite(number):
    tables = whole(Grid("equiangular", 12, 24), Grid("equiangular", 12, 24), 0.5)
    case = CudaCase(tables, depth=16, value_depth=16, dtype=DTYPES[number])
    for sign in (1.0, -1.0):
        case.k.copy_(torch.ones_like(case.k))
        case.q.copy_(torch.full_like(case.q, sign * 600.0 / 16))
        y, lse, *gradients = case.run()
        assert all(torch.isfinite(x).all() for x in (y, lse, *gradients))
        # An exponent of 600 log2(e) is itself known to 865 * 2^-24.
        assert error(y, case.dense(torch.float64)[0]) < max(TOLERANCE[number], 5e-5)


def test_rows_of_neighbours_may_lie_far_apart(number):
    case = CudaCase(distant_rows(), 1, 16, 16, scale=0.3, dtype=DTYPES[number])
    for got, exact in zip(case.run(), case.dense(torch.float64), strict=True):
        assert error(got, exact) < TOLERANCE[number]


def test_queries_without_keys_give_zero_and_pass_no_gradient(number):
    tables = list(whole(Grid("equiangular", 6, 12), Grid("equiangular", 6, 12), 0.6))
    tables[0] = tables[0].clone()
    tables[0][2] = -1
    y, lse, dq, dk, dv = CudaCase(tuple(tables), 2, 5, 3, dtype=DTYPES[number]).run()
    assert not y[:, :, 2].any() and not dq[:, :, 2].any() and (lse[:, :, 2] == -torch.inf).all()
    assert all(torch.isfinite(x).all() for x in (y, dq, dk, dv))


@pytest.mark.parametrize(
    ("tensor", "value"),
    [("q", torch.nan), ("k", torch.nan), ("v", torch.nan), ("v", torch.inf), ("dy", torch.nan), ("dy", -torch.inf)],
)
@pytest.mark.parametrize("number", ["float32", "bfloat16"], indirect=True)
def test_nan_and_infinity_reach_whoever_sees_them_and_nobody_else(tensor, value, number, parts):
    case = CudaCase(
        whole(Grid("equiangular", 12, 24), Grid("equiangular", 12, 24), 0.4), 1, 72, 8, scale=0.3, dtype=DTYPES[number]
    )
    point, channel = 5 * 24 + 7, {"q": 71, "k": 71, "v": 3, "dy": 3}[tensor]
    spoilt = getattr(case, tensor)[0, 0].view(12 * 24, -1)[point]
    spoilt[channel] = 0.0
    clean = case.run()
    spoilt[channel] = value
    sees = case.mask.flatten(0, 1)  # [queries, keys]
    queries = sees[:, point] if tensor in ("k", "v") else torch.arange(len(sees)) == point
    keys = sees[queries].any(0)
    one, all_, none = slice(channel, channel + 1), slice(None), slice(0)
    touched = {  # channels of y, lse, dq, dk, dv
        "q": (all_, all_, all_, all_, all_),
        "k": (all_, all_, all_, all_, all_),
        "v": (one, none, all_, all_, none),
        "dy": (none, none, all_, all_, one),
    }[tensor]
    points = queries, queries, queries, keys, keys
    for got, before, where, channels in zip(case.run(), clean, points, touched, strict=True):
        got, before = (x[0, 0].reshape(len(sees), -1).float() for x in (got, before))
        expected = torch.zeros_like(got, dtype=torch.bool)
        expected[where, channels] = True
        assert torch.equal(~torch.isfinite(got), expected)
        torch.testing.assert_close(got[~expected], before[~expected], rtol=0.02, atol=0.02)


def test_only_the_needed_gradients_are_computed():
    case = CudaCase(whole(Grid("equiangular", 12, 24), Grid("equiangular", 12, 24), 0.4), 2, 8, 8)
    both = case.run()[2:]
    dq, dk, dv = case.run((True, False))[2:]
    assert dk is None and dv is None and torch.equal(dq, both[0])
    dq, dk, dv = case.run((False, True))[2:]
    assert dq is None and torch.equal(dk, both[1]) and torch.equal(dv, both[2])


def test_any_memory_layout_gives_the_same_bits(number):
    case = CudaCase(
        whole(Grid("equiangular", 8, 16), Grid("equiangular", 8, 16), 0.5), 2, 8, 16, 2, dtype=DTYPES[number]
    )
    expected = case.run()
    case.q = case.q.contiguous()  # heads before points
    case.k = case.k.mT.contiguous().mT  # channels first
    case.v = torch.cat([case.v, torch.full_like(case.v, torch.nan)], -1)[..., :16]  # a slice of wider memory
    odd = torch.zeros(case.dy.numel() + 1, dtype=case.dy.dtype)[1:].view(case.dy.shape)  # off every 16 bytes
    case.dy = odd.copy_(case.dy)
    assert all(torch.equal(a, b) for a, b in zip(case.run(), expected, strict=True))


@pytest.mark.parametrize("number", ["bfloat16"], indirect=True)
def test_tensors_may_span_more_than_2_31_numbers(number):
    """Queries whose rows and keys whose points lie far apart, in memory of which few pages are ever touched."""
    case = CudaCase(
        whole(Grid("equiangular", 6, 12), Grid("equiangular", 6, 12), 0.6), 2, 8, 8, 2, dtype=DTYPES[number]
    )
    expected = case.run()

    def scattered(x, *strides):  # [B, N, points..., D]
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
        assert span > 2**31
        return torch.from_numpy(np.empty(span, np.int16)).view(x.dtype).as_strided(x.shape, strides).copy_(x)

    case.q, case.dy = (scattered(x, 1 << 12, 1 << 10, 3 << 28, 1 << 5, 1) for x in (case.q, case.dy))
    case.k, case.v = (scattered(x, 1 << 9, 1 << 5, 31_000_000, 1) for x in (case.k, case.v))
    assert all(torch.equal(a, b) for a, b in zip(case.run(), expected, strict=True))


def test_the_order_of_threads_changes_no_bit(kernels, number, monkeypatch):
    monkeypatch.setattr(schedule, "PART_NEIGHBOURS", SMALL_PART)
    tables = whole(Grid("equiangular", 13, 24), Grid("equiangular", 13, 24), 0.4)
    case = CudaCase(tables, 1, 24, 20, dtype=DTYPES[number])
    results = []
    for seed in (1, 2, 3):
        kernels.sfno_dist_cuda_on_cpu_shuffle(seed)
        results.append(case.run())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="needs PyTorch 2.9")
def test_tf32_may_be_allowed_by_either_name():
    case = CudaCase(whole(Grid("equiangular", 6, 12), Grid("equiangular", 6, 12), 0.6))
    matmul = torch.backends.cuda.matmul
    exact = case.run()
    matmul.allow_tf32 = True
    rounded = case.run()
    matmul.allow_tf32 = False
    matmul.fp32_precision = "tf32"
    again = case.run()
    matmul.fp32_precision = "ieee"
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in zip(rounded, again, exact, strict=True))


def test_op_is_registered_as_pytorch_asks():
    neighbourhood = Neighbourhood(Grid("equiangular", 4, 8), Grid("legendre-gauss", 3, 6))
    q, k, v = (torch.randn(1, 2, *shape).requires_grad_() for shape in ((3, 6, 3), (32, 3), (32, 2)))
    arguments = operands(q, k, v, Window.whole(neighbourhood), "cuda")
    assert set(torch.library.opcheck(torch.ops.sfno_dist.attend.default, arguments).values()) == {"SUCCESS"}


def test_inputs_that_do_not_fit_are_refused():
    grid = Grid("equiangular", 6, 12)
    case = CudaCase(whole(grid, grid, 0.6), dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"float32, bfloat16 or float16, got dtype 1.*reference"):
        case.run()
    with pytest.raises(RuntimeError, match="1 to 256 channels, got 260 of query"):
        CudaCase(whole(grid, grid, 0.6), 1, 260, 8).run()
    window = Window.whole(Neighbourhood(grid))
    y, _ = attend(torch.zeros(0, 2, 6, 12, 4), *(torch.zeros(0, 2, 72, 4) for _ in range(2)), window, backend="cuda")
    assert y.shape == (0, 2, 6, 12, 4)


def test_libraries_and_tensors_without_cuda_are_refused_with_a_remedy(monkeypatch):
    with pytest.raises(RuntimeError, match=r"no CUDA compiler was found: put nvcc on PATH .*pip install \."):
        compiled_cuda.declared(ctypes.CDLL(None))
    monkeypatch.setattr(compiled_cuda, "_memory", lambda: "cuda")
    with pytest.raises(TypeError, match="the compiled CUDA kernels take CUDA tensors of one device, got q on cpu"):
        CudaCase(whole(Grid("equiangular", 6, 12), Grid("equiangular", 6, 12), 0.6)).run()


def test_shared_memory_that_does_not_suffice_is_named(monkeypatch):
    case = CudaCase(whole(Grid("equiangular", 6, 12), Grid("equiangular", 6, 12), 0.6), 1, 256, 256)
    monkeypatch.setenv("CUDA_ON_CPU_SHARED_BYTES", str(48 << 10))
    with pytest.raises(RuntimeError, match=r"heads of 256 and 256 channels need .* this device has 49152"):
        case.run()


# --- wrong kernels and memory errors ------------------------------------------------------------------------------


def distant_rows():
    """One query row with neighbours in the first and last of 100 key rows, and none in a whole batch between."""
    half_widths = torch.full((1, 100), -1, dtype=torch.int32)
    half_widths[0, [0, 99]] = 8
    rows = torch.tensor([[0, 16, 16 * h] for h in range(100)])
    return half_widths, torch.full((100,), 0.1, dtype=torch.float64), rows, 64, 16, 0, 64


@pytest.mark.parametrize("barrier", ["everyone has read", "slots are filled", "the chunk is there for everyone"])
def test_a_missing_barrier_is_caught(barrier, tmp_path, monkeypatch):
    source = tmp_path / "csrc"
    shutil.copytree(CSRC, source)
    kernel = source / "cuda" / "tile_kernel.h"
    lines = kernel.read_text().splitlines()
    (faulty,) = (i for i, line in enumerate(lines) if "__syncthreads();  // " + barrier in line)
    del lines[faulty]
    kernel.write_text("\n".join(lines))
    sources = [source / "cuda" / "float32.cu" if path.stem == "float32" else path for path in kernel_sources()]
    library = load(build(sources))
    monkeypatch.setattr(compiled_cuda, "_library", lambda: library)
    monkeypatch.setenv("CUDA_ON_CPU_SHARED_BYTES", str(40 << 10))  # one chunk at a time: fewer barriers
    case = CudaCase(distant_rows(), 1, 16, 16)
    caught = 0
    for seed in range(8):
        library.sfno_dist_cuda_on_cpu_shuffle(seed)
        try:
            y = case.run()[0].double()
        except RuntimeError as refused:
            caught += "tile_kernel" in str(refused)
        else:
            wrong = float((y - case.dense(torch.float64)[0]).norm())
            caught += not wrong < 1e-3
    assert caught > 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizers as Linux does")
def test_sanitizers_find_nothing():
    library = build(kernel_sources(), SANITIZED)
    tests = "random_windows or layout or (less_shared and 70) or (wide_heads and parts and 136)"
    run_sanitized(__file__, tests, LIBRARY_VARIABLE, library, "detect_leaks=0:detect_stack_use_after_return=0")
