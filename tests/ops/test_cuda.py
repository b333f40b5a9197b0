"""The CUDA kernels on a GPU: ``pytest -m gpu``. What a CPU can check of them is in tests/cuda_on_cpu."""

from __future__ import annotations

import pytest
import torch
from cuda_on_cpu.test_attention_kernels import DTYPES, TOLERANCE, CudaCase
from golden_cases import NAMES, RESULTS, GoldenCase, largest_relative_error
from ops.test_compiled import check, error, random_tables, whole

from sfno_dist import Grid, Neighbourhood, SphericalAttention, spherical_attention
from sfno_dist.ops import Window, attend, compiled_cuda, schedule

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
pytestmark = pytest.mark.gpu


@pytest.fixture(params=DTYPES)
def number(request):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param == "tf32"
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


class GpuCase(CudaCase):
    def run(self, needs=(True, True)):
        def moved(*items):
            return [x.cuda() if isinstance(x, torch.Tensor) else x for x in items]

        q, k, v, dy, dlse = moved(self.q, self.k, self.v, self.dy, self.dlse)
        tables, tiles = moved(*self.tables), moved(*self.tiles)
        y, lse = compiled_cuda.forward(q, k, v, *tables, *tiles)
        gradients = compiled_cuda.backward(dy, dlse, q, k, v, y, lse, *tables, *tiles, *needs)
        return tuple(None if x is None else x.cpu() for x in (y, lse, *gradients))


@pytest.mark.parametrize("name", NAMES)
def test_golden_results_and_gradients(name, number):
    case = GoldenCase.load(name, DTYPES[number])
    q, k, v = (x.detach().cuda().requires_grad_() for x in (case.q, case.k, case.v))
    y = spherical_attention(q, k, v, case.grid_in, case.grid_out, theta_cutoff=case.theta_cutoff)
    y.backward(case.dy.cuda())
    for key, got in zip(RESULTS, (y, q.grad, k.grad, v.grad), strict=True):
        assert largest_relative_error(got.cpu(), case.results[key]) < TOLERANCE[number], key


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(
    random_tables(),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(1, 3),
    st.integers(1, 80),
    st.integers(1, 80),
    st.sampled_from([schedule.PART_NEIGHBOURS, 40]),
)
def test_random_windows_equal_brute_force(tables, number, heads, depth, value_depth, part):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "PART_NEIGHBOURS", part)
        check(GpuCase(tables, heads, depth, value_depth, scale=0.3, dtype=DTYPES[number]), DTYPES[number])


@pytest.mark.parametrize("widths", [(64, 64), (72, 136), (256, 8), (16, 256), (256, 256)], ids=str)
def test_wide_heads(widths, number):
    tables = whole(Grid("equiangular", 19, 36), Grid("legendre-gauss", 12, 24), 0.5)
    case = GpuCase(tables, 2, *widths, scale=0.1, dtype=DTYPES[number])
    for got, exact in zip(case.run(), case.dense(torch.float64), strict=True):
        assert error(got, exact) < TOLERANCE[number]


def test_nan_reaches_whoever_sees_it_and_nobody_else(number):
    case = GpuCase(whole(Grid("equiangular", 12, 24), Grid("equiangular", 12, 24), 0.4), 1, 72, 8, dtype=DTYPES[number])
    case.v[0, 0, 5 * 24 + 7, 3] = torch.nan
    y, lse, dq, dk, dv = (x[0, 0].reshape(12 * 24, -1) for x in case.run())
    sees = case.mask.flatten(0, 1)[:, 5 * 24 + 7]
    assert torch.equal(torch.isnan(y).any(1), sees) and torch.equal(torch.isnan(y[:, 3]), sees)
    assert torch.equal(torch.isnan(dq).all(1), sees) and torch.equal(torch.isnan(dq).any(1), sees)
    assert torch.isfinite(lse).all() and torch.isfinite(dv).all()
    assert torch.equal(torch.isnan(dk).any(1), case.mask.flatten(0, 1)[sees].any(0))


def arguments(grid: Grid, dtype: torch.dtype = torch.float32, width: int = 32):
    torch.manual_seed(0)
    window = Window.whole(Neighbourhood(grid, None, 0.2))
    shapes = (1, 2, *grid.shape, width), (1, 2, grid.nlat * grid.nlon, width), (1, 2, grid.nlat * grid.nlon, width)
    return *(torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes), window


def gradients(q, k, v, window):
    y, lse = attend(q, k, v, window)
    return torch.autograd.grad(y.square().sum() + lse.sum(), (q, k, v))


def test_two_runs_give_the_same_bits(number):
    inputs = arguments(Grid("equiangular", 91, 180), DTYPES[number])
    first = gradients(*inputs)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(gradients(*inputs), first, strict=True))


def test_nothing_waits_for_the_device():
    inputs = arguments(Grid("equiangular", 31, 60))
    gradients(*inputs)  # makes the tables
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_works_on_another_stream():
    inputs = arguments(Grid("equiangular", 91, 180))
    expected = gradients(*inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = gradients(*inputs)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_can_be_captured_in_a_graph():
    q, k, v, window = arguments(Grid("equiangular", 91, 180))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gradients(q, k, v, window)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(q, k, v, window)
    with torch.no_grad():
        q.mul_(0.5)
    graph.replay()
    expected = gradients(q, k, v, window)
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_layer_gives_what_it_gives_on_the_cpu(dtype):
    layer = SphericalAttention(64, Grid("equiangular", 31, 60), Grid("legendre-gauss", 16, 32), num_heads=4)
    query, field = torch.randn(2, 64, 16, 32), torch.randn(2, 64, 31, 60)
    expected = layer(query, field)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        got = layer.cuda()(query.cuda(), field.cuda()).float().cpu()
    assert error(got, expected) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_float64_is_refused_with_a_remedy():
    with pytest.raises(RuntimeError, match="choose backend='reference'"):
        gradients(*arguments(Grid("equiangular", 6, 12), torch.float64))
