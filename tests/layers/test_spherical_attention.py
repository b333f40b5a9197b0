"""The attention layer against torch-harmonics, by symmetry, and through PyTorch's module machinery."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from sfno_dist import Grid, SphericalAttention

WIDTH = 8


def peer_layer(grid_in: Grid, grid_out: Grid, **options):
    pytest.importorskip("torch_harmonics", reason="torch-harmonics is installed by hand, see .ci/run")
    from torch_harmonics import NeighborhoodAttentionS2

    torch.manual_seed(0)
    layer = NeighborhoodAttentionS2(
        WIDTH,
        grid_in.shape,
        grid_out.shape,
        grid_in=grid_in.kind,
        grid_out=grid_out.kind,
        optimized_kernel=False,
        **options,
    )
    for parameter in layer.parameters():  # biases and norm weights start at zero and would hide a mix-up
        torch.nn.init.uniform_(parameter, -0.5, 0.5)
    return layer


@pytest.mark.parametrize(
    ("shape_in", "shape_out", "kind"),
    [
        ((12, 24), (12, 24), "equiangular"),
        ((12, 24), (6, 12), "equiangular"),
        ((6, 12), (12, 24), "equiangular"),
        ((10, 20), (10, 20), "legendre-gauss"),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_heads": 2, "use_qknorm": True},
        {"bias": False, "k_channels": 4, "out_channels": 6, "num_heads": 2, "theta_cutoff": 0.6},
        {"scale": 0.3},
    ],
    ids=str,
)
def test_state_dicts_of_torch_harmonics_load_and_give_equal_output(shape_in, shape_out, kind, options):
    grid_in, grid_out = Grid(kind, *shape_in), Grid(kind, *shape_out)
    peer = peer_layer(grid_in, grid_out, **options)
    ours = {("qk_norm" if name == "use_qknorm" else name): value for name, value in options.items()}
    layer = SphericalAttention(WIDTH, grid_in, grid_out, **{"theta_cutoff": peer.theta_cutoff, **ours})
    layer.load_state_dict(peer.state_dict(), strict=True)
    query = torch.randn(2, WIDTH, *shape_out)
    key, value = torch.randn(2, WIDTH, *shape_in), torch.randn(2, WIDTH, *shape_in)
    torch.testing.assert_close(layer(query, key, value), peer(query, key, value), rtol=1e-4, atol=1e-5)


def test_default_cutoff_is_that_of_torch_harmonics():
    grid = Grid("equiangular", 12, 24)
    assert SphericalAttention(WIDTH, grid).neighbourhood.theta_cutoff == pytest.approx(
        peer_layer(grid, grid).theta_cutoff
    )


def test_key_and_value_default_to_the_query():
    torch.manual_seed(0)
    layer = SphericalAttention(WIDTH, Grid("equiangular", 7, 12), num_heads=2)
    x = torch.randn(1, WIDTH, 7, 12)
    assert torch.equal(layer(x), layer(x, x, x))
    key = torch.randn_like(x)
    assert torch.equal(layer(x, key), layer(x, key, key))


def test_attention_over_longitudes_is_equivariant_under_turns():
    torch.manual_seed(0)
    layer = SphericalAttention(WIDTH, Grid("equiangular", 13, 24), Grid("equiangular", 7, 12), num_heads=2).double()
    query, key = torch.randn(1, WIDTH, 7, 12).double(), torch.randn(1, WIDTH, 13, 24).double()
    turned = layer(query.roll(1, -1), key.roll(2, -1))
    torch.testing.assert_close(turned, layer(query, key).roll(1, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_layers_survive_copies(clone):
    torch.manual_seed(0)
    layer = SphericalAttention(WIDTH, Grid("equiangular", 7, 12))
    x = torch.randn(1, WIDTH, 7, 12)
    assert torch.equal(clone(layer)(x), layer(x))


def in_a_new_process(layer: SphericalAttention, x: torch.Tensor) -> torch.Tensor:
    return layer(x).detach()


@pytest.mark.slow
def test_layers_work_in_spawned_processes():
    torch.manual_seed(0)
    layer = SphericalAttention(WIDTH, Grid("equiangular", 7, 12))
    x = torch.randn(1, WIDTH, 7, 12)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert torch.equal(pool.submit(in_a_new_process, layer, x).result(), layer(x))


def test_rows_that_grow_while_columns_shrink():
    """12 x 24 -> 24 x 12, and 12 x 24 -> 40 x 24 at the default cutoff: no row is left without keys."""
    for grid_out in (Grid("equiangular", 24, 12), Grid("equiangular", 40, 24)):
        layer = SphericalAttention(WIDTH, Grid("equiangular", 12, 24), grid_out)
        reference = SphericalAttention(WIDTH, Grid("equiangular", 12, 24), grid_out, backend="reference")
        reference.load_state_dict(layer.state_dict())
        query, key = torch.randn(1, WIDTH, *grid_out.shape), torch.randn(1, WIDTH, 12, 24)
        assert torch.isfinite(layer(query, key)).all()
        torch.testing.assert_close(layer(query, key), reference(query, key), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_layers_follow_dtype(dtype):
    torch.manual_seed(0)
    layer = SphericalAttention(WIDTH, Grid("equiangular", 7, 12), num_heads=2, qk_norm=True)
    x = torch.randn(1, WIDTH, 7, 12)
    expected = layer(x)
    y = layer.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.2)  # of values up to 5


def test_autocast_computes_in_the_lower_precision():
    torch.manual_seed(0)
    layer = SphericalAttention(WIDTH, Grid("equiangular", 7, 12), qk_norm=True)
    x = torch.randn(1, WIDTH, 7, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("grid_out", [Grid("equiangular", 7, 12), Grid("legendre-gauss", 5, 9)], ids=str)
def test_the_whole_layer_compiles_into_one_graph(grid_out):
    layer = SphericalAttention(WIDTH, Grid("equiangular", 7, 12), grid_out, num_heads=2, qk_norm=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    query, key = torch.randn(1, WIDTH, *grid_out.shape), torch.randn(1, WIDTH, 7, 12)
    gradients = []
    for run in (layer, compiled):
        layer.zero_grad()
        y = run(query, key)
        y.square().sum().backward()
        gradients.append([y, *(p.grad.clone() for p in layer.parameters())])
    for eager, traced in zip(*gradients, strict=True):
        torch.testing.assert_close(traced, eager)


def test_state_dict_holds_the_parameters_only():
    layer = SphericalAttention(WIDTH, Grid("equiangular", 7, 12), qk_norm=True)
    names = {f"{part}_{kind}" for part in ("q", "k", "v", "proj") for kind in ("weights", "bias")}
    assert set(layer.state_dict()) == names | {"q_norm_weights", "k_norm_weights"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 3}, "num_heads=3 does not divide k_channels=8"),
        ({"num_heads": 4, "out_channels": 6}, "num_heads=4 does not divide out_channels=6"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"theta_cutoff": 1e-3, "grid_out": Grid("equiangular", 40, 24)}, "smallest cutoff that works"),
        ({"backend": "fast"}, "unknown backend"),
    ],
)
def test_impossible_layers_are_refused_at_construction(options, words):
    with pytest.raises(ValueError, match=words):
        SphericalAttention(WIDTH, Grid("equiangular", 12, 24), **options)


def test_fields_that_do_not_fit_the_grid_are_named():
    layer = SphericalAttention(WIDTH, Grid("equiangular", 12, 24))
    with pytest.raises(ValueError, match=r"query must be \[batch, channels, 12, 24\] for the grid equiangular 12 x 24"):
        layer(torch.zeros(1, WIDTH, 24, 12))
