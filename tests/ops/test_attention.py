"""spherical_attention on every backend: golden results, finite differences, extreme logits, symmetries."""

import numpy as np
import pytest
import torch
from golden_cases import NAMES, RESULTS, GoldenCase, largest_relative_error

from sfno_dist import Grid, Neighbourhood, spherical_attention
from sfno_dist.ops import Window, attend, reference
from sfno_dist.ops.attend import BACKENDS, operands

CPU_BACKENDS = [name for name in BACKENDS if name != "cuda"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


@pytest.fixture(params=CPU_BACKENDS)
def backend(request) -> str:
    return request.param


def random_qkv(neighbourhood, batch=1, heads=2, width=3, value_width=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    grid_in, grid_out = neighbourhood.grid_in, neighbourhood.grid_out
    shapes = (
        (batch, heads, *grid_out.shape, width),
        (batch, heads, grid_in.nlat * grid_in.nlon, width),
        (batch, heads, grid_in.nlat * grid_in.nlon, value_width),
    )
    return tuple(torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_golden_results_and_gradients(name, dtype, backend):
    case = GoldenCase.load(name, dtype)
    y = spherical_attention(
        case.q, case.k, case.v, case.grid_in, case.grid_out, theta_cutoff=case.theta_cutoff, backend=backend
    )
    y.backward(case.dy)
    got = dict(zip(RESULTS, (y, case.q.grad, case.k.grad, case.v.grad), strict=True))
    assert y.dtype == dtype
    for key in RESULTS:
        assert largest_relative_error(got[key], case.results[key]) < TOLERANCE[dtype], key


@pytest.mark.parametrize("name", NAMES)
def test_golden_geometry(name):
    case = GoldenCase.load(name)
    np.testing.assert_allclose(case.grid_in.colatitudes, case.arrays["colatitude_in"], atol=1e-13)
    np.testing.assert_allclose(case.grid_in.weights, case.arrays["weights_in"], atol=1e-14)
    neighbourhood = Neighbourhood(case.grid_in, case.grid_out, case.theta_cutoff)
    of_first_column = [
        sum(int(neighbourhood.arcs(r, h)[1][0]) for h in range(case.grid_in.nlat)) for r in range(case.grid_out.nlat)
    ]
    assert of_first_column == case.arrays["neighbours_per_output_row"].tolist()


def test_there_are_eleven_golden_cases():
    assert len(NAMES) == 11


@pytest.mark.parametrize("shapes", [((4, 8), (4, 8)), ((4, 8), (3, 6)), ((3, 5), (5, 7))], ids=str)
def test_gradients_equal_finite_differences(shapes, backend):
    neighbourhood = Neighbourhood(Grid("equiangular", *shapes[0]), Grid("legendre-gauss", *shapes[1]), 0.9)
    qkv = random_qkv(neighbourhood)
    # Both outputs: the gradient of lse matters where partial results are merged.
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, Window.whole(neighbourhood), backend=backend), qkv)


def test_op_is_registered_as_pytorch_asks(backend):
    neighbourhood = Neighbourhood(Grid("equiangular", 4, 8), Grid("legendre-gauss", 3, 6))
    q, k, v = random_qkv(neighbourhood, dtype=torch.float32)
    arguments = operands(q, k, v, Window.whole(neighbourhood), backend)
    assert set(torch.library.opcheck(torch.ops.sfno_dist.attend.default, arguments).values()) == {"SUCCESS"}


def test_no_gradient_is_computed_that_nobody_needs(backend):
    neighbourhood = Neighbourhood(Grid("equiangular", 6, 12))
    q, k, v = random_qkv(neighbourhood)
    everything = torch.autograd.grad(attend(q, k, v, Window.whole(neighbourhood), backend=backend)[0].sum(), (q, k, v))
    for frozen in range(3):
        inputs = [x.detach().requires_grad_(i != frozen) for i, x in enumerate((q, k, v))]
        y, _ = attend(*inputs, Window.whole(neighbourhood), backend=backend)
        y.sum().backward()
        for i, x in enumerate(inputs):
            assert (x.grad is None) if i == frozen else torch.equal(x.grad, everything[i])


def test_second_derivative_is_refused(backend):
    neighbourhood = Neighbourhood(Grid("equiangular", 4, 8))
    q, k, v = random_qkv(neighbourhood)
    y, _ = attend(q, k, v, Window.whole(neighbourhood), backend=backend)
    (dq,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [600.0, -600.0])
def test_logits_of_600_stay_finite_and_right(size, dtype, backend):
    neighbourhood = Neighbourhood(Grid("equiangular", 5, 8), None, 1.0)
    q, k, v = random_qkv(neighbourhood, heads=1, width=1, dtype=dtype)
    with torch.no_grad():
        q.fill_(size)
        k.fill_(1.0)
        k[:, :, 11] = 0.5 if size > 0 else 1.5  # one key far below the others
    y, lse = attend(q, k, v, Window.whole(neighbourhood), backend=backend)
    y.sum().backward()
    for x in (y, lse, q.grad, k.grad, v.grad):
        assert torch.isfinite(x).all()
    # exp(-300) is nothing: the result is the area-weighted mean of the other neighbours' values.
    keep = torch.ones(40, dtype=dtype)
    keep[11] = 0.0
    areas = torch.from_numpy(np.repeat(neighbourhood.grid_in.cell_areas, 8)).to(dtype) * keep
    for r in range(5):
        mask = torch.zeros(40, dtype=dtype)
        for h in range(5):
            first, count = neighbourhood.arcs(r, h)
            mask[h * 8 + (int(first[3]) + torch.arange(int(count[3]))) % 8] = 1.0
        weights = areas * mask
        torch.testing.assert_close(y[0, 0, r, 3], weights @ v[0, 0] / weights.sum())


def test_constant_values_pass_through_unchanged(backend):
    grid = Grid("legendre-gauss", 9, 14)
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 6, 9, 14, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.arange(4.0, dtype=torch.float64)[None, :, None, None].expand(2, 4, 9, 14)
    y = spherical_attention(q, k, v, grid, theta_cutoff=0.8, num_heads=2, backend=backend)
    torch.testing.assert_close(y, v, rtol=1e-13, atol=1e-13)


def test_turning_and_mirroring_the_globe_turns_and_mirrors_the_result(backend):
    grid_in, grid_out = Grid("equiangular", 10, 24), Grid("equiangular-offset", 6, 16)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 4, 6, 16, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, 4, 10, 24, generator=generator, dtype=torch.float64) for _ in range(2))

    def attention(q, k, v):
        return spherical_attention(q, k, v, grid_in, grid_out, theta_cutoff=0.6, num_heads=2, backend=backend)

    turned = attention(q.roll(2, -1), k.roll(3, -1), v.roll(3, -1))  # both by 45 degrees
    torch.testing.assert_close(turned, attention(q, k, v).roll(2, -1), rtol=1e-12, atol=1e-12)
    mirrored = attention(q.flip(-2), k.flip(-2), v.flip(-2))
    torch.testing.assert_close(mirrored, attention(q, k, v).flip(-2), rtol=1e-12, atol=1e-12)


def test_windows_merge_into_the_whole(backend):
    """Keys in two disjoint windows, merged from (y, lse), equal all keys at once; a window may pass the seam."""
    neighbourhood = Neighbourhood(Grid("equiangular", 7, 12), Grid("legendre-gauss", 5, 10), 0.8)
    q, k, v = random_qkv(neighbourhood)
    whole, whole_lse = attend(q, k, v, Window.whole(neighbourhood), backend=backend)
    query = q[:, :, 1:4, 3:9]
    first, counts = np.array([10, 3, 0, 11, 5, 7, 2]), np.array([5, 12, 1, 4, 0, 7, 9])
    parts = []
    for start, number in ((first, counts), ((first + counts) % 12, 12 - counts)):
        index = [h * 12 + (f + j) % 12 for h, (f, n) in enumerate(zip(start, number, strict=True)) for j in range(n)]
        window = Window(neighbourhood, (1, 4), (3, 9), (0, 7), tuple(start.tolist()), tuple(number.tolist()))
        parts.append(attend(query, k[:, :, index], v[:, :, index], window, backend=backend))
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(y * torch.exp(part - lse)[..., None] for y, part in parts)
    torch.testing.assert_close(merged, whole[:, :, 1:4, 3:9], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse[:, :, 1:4, 3:9], rtol=1e-12, atol=1e-12)


def test_window_without_keys_gives_nothing(backend):
    neighbourhood = Neighbourhood(Grid("equiangular", 9, 12), None, 0.5)
    q, k, v = random_qkv(neighbourhood)
    window = Window(neighbourhood, (0, 2), (0, 12), (7, 9), (0, 0), (12, 12))  # the far pole
    k_far, v_far = k[:, :, -24:], v[:, :, -24:]
    y, lse = attend(q[:, :, :2], k_far, v_far, window, backend=backend)
    assert torch.all(y == 0) and torch.all(lse == -torch.inf)
    y.sum().backward()
    assert torch.all(q.grad == 0) and torch.all(k.grad == 0) and torch.all(v.grad == 0)


def test_vmap_is_a_loop(backend):
    window = Window.whole(Neighbourhood(Grid("equiangular", 4, 8), Grid("legendre-gauss", 3, 6)))
    q, k, v = random_qkv(window.neighbourhood)
    queries = torch.stack([q, 2 * q, -q], dim=2).detach()

    def total(q, k, v):
        y, lse = attend(q, k, v, window, backend=backend)
        return y.square().sum() + lse.sum()

    mapped = torch.func.vmap(total, in_dims=(2, None, None))(queries, k, v)
    torch.testing.assert_close(mapped, torch.stack([total(queries[:, :, i], k, v) for i in range(3)]))
    # The gradient under vmap: several dy at once for one forward pass.
    y, _ = attend(q, k, v, window, backend=backend)
    several = torch.randn(3, *y.shape, dtype=y.dtype)
    together = torch.autograd.grad(y, (q, k, v), several, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        for batched, alone in zip(
            together, torch.autograd.grad(y, (q, k, v), several[i], retain_graph=True), strict=True
        ):
            torch.testing.assert_close(batched[i], alone)


def test_a_forecast_before_training_does_no_harm(backend):
    neighbourhood = Neighbourhood(Grid("equiangular", 5, 10), None, 0.83)  # one that no other test has cached
    q, k, v = random_qkv(neighbourhood)
    with torch.inference_mode():
        expected, _ = attend(q, k, v, Window.whole(neighbourhood), backend=backend)
    y, _ = attend(q, k, v, Window.whole(neighbourhood), backend=backend)
    y.sum().backward()
    assert torch.equal(y, expected) and q.grad.abs().sum() > 0


def test_batch_of_nothing(backend):
    neighbourhood = Neighbourhood(Grid("equiangular", 4, 8))
    q, k, v = random_qkv(neighbourhood, batch=0)
    y, _ = attend(q, k, v, Window.whole(neighbourhood), backend=backend)
    assert y.shape == (0, 2, 4, 8, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 3}, "8 channels, which 3 heads do not divide; choose num_heads among 1, 2, 4, 8"),
        ({"query": (1, 8, 12, 25)}, r"query must be \[batch, channels, 12, 24\]"),
        ({"value": (2, 8, 12, 24)}, "v has shape"),
        ({"key": (1, 4, 12, 24)}, "same channels, got 8 and 4"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, words):
    fields = {name: torch.zeros(change.pop(name, (1, 8, 12, 24))) for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=words):
        spherical_attention(**fields, grid_in=Grid("equiangular", 12, 24), **change)


def test_mixed_dtypes_are_refused():
    neighbourhood = Neighbourhood(Grid("equiangular", 4, 8))
    q, k, v = random_qkv(neighbourhood)
    with pytest.raises(ValueError, match="share one dtype"):
        attend(q, k.float(), v, Window.whole(neighbourhood))


def test_reference_agrees_with_pytorch_on_a_global_neighbourhood():
    """With every key in reach and the log-areas as bias this is PyTorch's own attention."""
    grid = Grid("equiangular", 6, 12)
    neighbourhood = Neighbourhood(grid, None, 4.0)
    q, k, v = random_qkv(neighbourhood)
    bias = torch.from_numpy(np.log(np.repeat(grid.cell_areas, grid.nlon)))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.flatten(2, 3), k, v, attn_mask=bias.expand(72, 72), scale=1.0
    )
    y, _ = reference.forward(*operands(q, k, v, Window.whole(neighbourhood), "reference")[:9])
    torch.testing.assert_close(y.flatten(2, 3), expected, rtol=1e-12, atol=1e-12)
