"""The layer and the model on several processes give each its tile of what one process gets."""

import pytest
import torch
import torch.distributed as dist
from golden_cases import NAMES, RESULTS, GoldenCase, largest_relative_error

from distributed.ranks import run_ranks
from sfno_dist import Decomposition, Grid, Neighbourhood, ProcessMesh, SphericalAttention, SphericalTransformer
from sfno_dist.layers.exchange import make_exchange

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (3, 2), (1, 3)]
ODD = Grid("equiangular", 13, 24), Grid("equiangular", 19, 40), Grid("legendre-gauss", 17, 30)
# (keys, queries, options)
CASES = [
    (ODD[0], ODD[0], {}),
    (ODD[1], ODD[1], {"num_heads": 2, "qk_norm": True, "theta_cutoff": 0.5}),
    (ODD[2], ODD[2], {"theta_cutoff": 4.0}),
    (ODD[1], ODD[0], {"num_heads": 2}),
    (ODD[0], ODD[2], {"theta_cutoff": 0.7}),
    (Grid("equiangular", 24, 48), Grid("equiangular", 7, 12), {"theta_cutoff": 0.27}),
]


def cut(field, tile):
    return field[:, :, tile.rows, tile.columns].detach().clone()


def layer_errors(polar, azimuth):
    """Largest differences from one process, by case, exchange and frozen part."""
    mesh = ProcessMesh(1, polar, azimuth, timeout_s=300)
    errors = {}
    for number, (keys, queries, options) in enumerate(CASES):
        for exchange in ("halo", "ring"):
            for frozen in ("", "k") if number == 1 else ("",):
                torch.manual_seed(number)
                serial = SphericalAttention(4, keys, queries, **options).double()
                for p in serial.parameters():
                    torch.nn.init.uniform_(p, -0.5, 0.5)
                layer = SphericalAttention(4, keys, queries, mesh=mesh, exchange=exchange, **options).double()
                layer.load_state_dict(serial.state_dict())
                if frozen:
                    for part in (serial, layer):
                        part.k_weights.requires_grad_(False)
                        part.k_bias.requires_grad_(False)
                        part.k_norm_weights.requires_grad_(False)
                errors[number, exchange, frozen] = difference(serial, layer, frozen)
    return errors


def difference(serial, layer, frozen):
    of_queries, of_keys = layer.queries, layer.keys
    shapes = (of_queries.grid.shape, of_keys.grid.shape, of_keys.grid.shape)
    fields = [torch.randn(2, 4, *shape, dtype=torch.float64) for shape in shapes]
    tiles = [cut(x, t) for x, t in zip(fields, (of_queries, of_keys, of_keys), strict=True)]
    for i in range(3):
        if not (frozen and i == 1):
            fields[i].requires_grad_()
            tiles[i].requires_grad_()
    y, part = serial(*fields), layer(*tiles)
    dy = torch.randn_like(y)
    y.backward(dy)
    part.backward(cut(dy, of_queries))
    worst = [(part - cut(y, of_queries)).abs().max()]
    for x, t, where in zip(fields, tiles, (of_queries, of_keys, of_keys), strict=True):
        if x.grad is not None:
            worst.append((t.grad - cut(x.grad, where)).abs().max())
    for p, q in zip(serial.parameters(), layer.parameters(), strict=True):
        if p.requires_grad:
            total = q.grad.clone()
            if layer.mesh.size > 1:
                dist.all_reduce(total)
            worst.append((total - p.grad).abs().max() / p.grad.abs().max().clamp(min=1.0))
    return float(torch.stack(worst).max())


@pytest.mark.parametrize(("polar", "azimuth"), MESHES)
def test_every_tile_is_that_of_one_process(polar, azimuth):
    for result in run_ranks(polar * azimuth, layer_errors, polar, azimuth):
        assert isinstance(result, dict), result
        assert all(error < 1e-10 for error in result.values()), result


def golden_errors(polar, azimuth):
    mesh, errors = ProcessMesh(1, polar, azimuth, timeout_s=300), {}
    for name in NAMES:
        for exchange in ("halo", "ring"):
            case = GoldenCase.load(name)
            keys, queries = Decomposition(case.grid_in, mesh), Decomposition(case.grid_out, mesh)
            neighbourhood = Neighbourhood(case.grid_in, case.grid_out, case.theta_cutoff)
            attention = make_exchange(exchange, neighbourhood, keys, queries)
            tiles = [cut(x, t).requires_grad_() for x, t in ((case.q, queries), (case.k, keys), (case.v, keys))]
            y = attention(*(x.movedim(1, -1).unsqueeze(1) for x in tiles), None)
            y = y.squeeze(1).movedim(-1, 1)
            y.backward(cut(case.dy, queries))
            got = dict(zip(RESULTS, (y, *(x.grad for x in tiles)), strict=True))
            for key, tile in zip(RESULTS, (queries, queries, keys, keys), strict=True):
                expected = case.results[key][:, :, tile.rows, tile.columns]
                errors[name, exchange, key] = largest_relative_error(got[key], expected)
    return errors


@pytest.mark.parametrize(("polar", "azimuth"), [(2, 2), (1, 3), (3, 1)])
def test_golden_cases(polar, azimuth):
    for result in run_ranks(polar * azimuth, golden_errors, polar, azimuth):
        assert isinstance(result, dict), result
        assert max(result.values()) < 1e-8, result


def step_error(exchange):
    mesh = ProcessMesh(1, 2, 2, timeout_s=300)
    grid, latent = ODD[0], Grid("legendre-gauss", 6, 12)
    torch.manual_seed(0)
    settings = {"embed_channels": 8, "depth": 2, "num_heads": 2}
    serial = SphericalTransformer(3, 2, grid, latent, **settings).double()
    torch.nn.init.normal_(serial.head.weight)
    model = SphericalTransformer(3, 2, grid, latent, mesh=mesh, exchange=exchange, **settings).double()
    model.load_state_dict(serial.state_dict())
    x, tile = torch.randn(2, 3, *grid.shape, dtype=torch.float64), Decomposition(grid, mesh)
    areas = torch.from_numpy(grid.cell_areas.copy())[:, None].expand(grid.shape)
    (serial(x).square() * areas).sum().backward()
    (model(cut(x, tile)).square() * areas[tile.rows, tile.columns]).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    for m in (serial, model):
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    return max(float((p - q).abs().max()) for p, q in zip(serial.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("exchange", ["halo", "ring"])
def test_one_optimiser_step_of_the_model_is_that_of_one_process(exchange):
    for result in run_ranks(4, step_error, exchange):
        assert isinstance(result, float) and result < 1e-10, result
