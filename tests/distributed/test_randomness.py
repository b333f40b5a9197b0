"""What the tiles draw is what one process draws there, to the last bit."""

import pytest
import torch
import torch.distributed as dist

from distributed.ranks import run_ranks
from sfno_dist import Decomposition, Grid, ProcessMesh, SphericalTransformer
from sfno_dist.layers import Dropout, Noise, PathDropout, Randomness
from sfno_dist.mesh.decomposition import even_bounds

GRID, LATENT, BATCH = Grid("equiangular", 13, 23), Grid("legendre-gauss", 7, 13), 3
RANDOM = {"dropout": 0.2, "path_dropout": 0.3, "input_noise": 0.1, "state_channels": 2}


def mine(mesh):
    """Numbers of the samples of this replica, of uneven shares."""
    bounds = even_bounds(BATCH, mesh.data)
    return torch.arange(bounds[mesh.data_index], bounds[mesh.data_index + 1])


def drawn(mesh, samples, dtype):
    """Ones after each layer that draws, on this process's tile."""
    tile = Decomposition(GRID, mesh)
    field = torch.ones(len(samples), 6, *tile.tile_shape, dtype=dtype)
    layers = (
        Dropout(0.3, GRID, place=1, mesh=mesh), PathDropout(0.5, place=2), Noise(0.1, 5, GRID, place=3, mesh=mesh)
    )  # fmt: skip
    randomness = Randomness(mesh)
    randomness.at(seed=2**40 + 7, step=11, micro_batch=1, samples=samples)
    moment = randomness.next(field)
    return [layer(field, moment) for layer in layers]


def part(whole, mesh):
    tile = Decomposition(GRID, mesh)
    return whole[mine(mesh)][..., tile.rows, tile.columns]


def same_as_serial(*sizes):
    mesh = ProcessMesh(*sizes, timeout_s=300)
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        whole = drawn(ProcessMesh(), torch.arange(BATCH), dtype)
        tiles = drawn(mesh, mine(mesh), dtype)
        found += [torch.equal(part(a, mesh), b) for a, b in zip(whole, tiles, strict=True)]
        found.append(len(whole[0].unique()) == 2)  # the mask is not trivial
    return found


@pytest.mark.parametrize("sizes", [(1, 2, 2), (1, 3, 1), (1, 1, 3), (2, 1, 2), (2, 1, 1), (1, 2, 4)])
def test_masks_and_noise_on_any_mesh_are_those_of_one_process(sizes):
    for result in run_ranks(sizes[0] * sizes[1] * sizes[2], same_as_serial, *sizes):
        assert result == [True] * 12, result


def made(mesh):
    torch.manual_seed(0)
    model = SphericalTransformer(
        5, 2, GRID, LATENT, embed_channels=8, depth=2, num_heads=2, mesh=mesh, **RANDOM
    ).double()  # fmt: skip
    torch.nn.init.normal_(model.head.weight)
    return model


def results(model, field, samples):
    """The output of two applications in training, the second on top of the first, and the weights' gradients."""
    model.randomness.at(seed=5, step=4, samples=samples)
    first = model(field)
    y = model(torch.cat([field[:, :2] + first, field[:, 2:]], 1))
    y.square().sum().backward()
    return y.detach(), [p.grad for p in model.parameters()]


def gaps(*sizes):
    mesh = ProcessMesh(*sizes, timeout_s=300)
    field = torch.randn(BATCH, 5, *GRID.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, expected = results(made(ProcessMesh()), field, torch.arange(BATCH))
    y, gradients = results(made(mesh), part(field, mesh), mine(mesh))
    for gradient in gradients:
        dist.all_reduce(gradient)
    scale = max(float(g.abs().max()) for g in expected)
    worst = max(float((a - b).abs().max()) for a, b in zip(gradients, expected, strict=True))
    return float((y - part(whole, mesh)).abs().max()), worst / scale


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2)])
def test_a_model_that_draws_is_that_of_one_process_with_its_gradients(sizes):
    for result in run_ranks(4, gaps, *sizes):
        assert isinstance(result, tuple) and max(result) < 1e-10, result


def other_moments():
    mesh = ProcessMesh(1, 1, 2, timeout_s=300)
    messages = []
    for at in ({"seed": mesh.rank, "step": 0}, {"seed": 0, "step": mesh.rank}):
        with pytest.raises(ValueError, match="seed, step and micro-batch") as caught:
            Randomness(mesh).at(**at)
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match="dropout") as caught:
        SphericalTransformer(5, 2, GRID, LATENT, mesh=mesh, dropout=0.1 * mesh.rank)
    return [*messages, str(caught.value)]


def test_processes_that_would_draw_differently_get_the_same_error():
    first, second = run_ranks(2, other_moments)
    assert isinstance(first, list), first
    assert first == second
