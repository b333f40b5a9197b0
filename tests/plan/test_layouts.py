"""Which layouts are offered, which one is recommended, and what cannot be planned."""

import itertools

import numpy as np
import pytest
import torch

from sfno_dist import Grid, Neighbourhood, ProcessMesh
from sfno_dist.plan.command import report
from sfno_dist.plan.layouts import Choice, busiest, choices, parsed_memory, recommended
from sfno_dist.plan.memory import LiveBytes
from sfno_dist.plan.step import Cost, in_precision, paper_module, step_cost
from sfno_dist.training.compose import compose_training

GRID = Grid("equiangular", 73, 144)
TINY = ["name=plan", "paths.output=.", "grid.latent.nlat=8", "grid.latent.nlon=16", "model.depth=1"]
LARGE = ["data=era5", "grid=era5_1deg", "model.embed_channels=8", "model.depth=1"]


def test_live_bytes_are_those_that_can_be_counted_by_hand():
    with LiveBytes(torch.nn.Identity()) as live:
        a = torch.zeros(1000)  # 4000 bytes
        b = a.view(10, 100)  # none
        c = b + 1.0  # 4000
        del a, b
        d = c.double()  # 8000
        assert (live.held, live.peak) == (12000, 12000)
        del c, d
        torch.zeros(1)
    assert (live.held, live.peak) == (0, 12000)


def test_weights_gradients_and_the_optimisers_state_are_those_of_the_model():
    config = compose_training([*TINY, "data.batch_size=4"])
    cost = step_cost(config, GRID, ProcessMesh.on_paper(data=2))
    module = paper_module(config, GRID, ProcessMesh())
    count = sum(p.numel() for p in module.parameters())
    assert (cost.parameters, cost.gradients, cost.buckets) == (count, 4 * count, 4 * count)
    assert cost.optimizer == pytest.approx(8 * count, rel=0.01)  # two moments, and the number of steps
    # state and target of 2 variables, features, climatology: 2 samples for each of two replicas
    points = GRID.nlat * GRID.nlon
    assert cost.batch == pytest.approx(4 * 2 * points * (2 * 2 + module.recipe.feature_channels + 2), rel=0.01)


def test_the_work_of_bands_is_what_neighbourhoods_say():
    config = compose_training([*TINY, "grid.latent.kind=equiangular", "grid.latent.nlat=9"])
    cost = step_cost(config, GRID, ProcessMesh.on_paper(polar=3))
    latent = Grid("equiangular", 9, 16)
    expected = np.zeros(3)
    for grid_in, grid_out in ((GRID, latent), (latent, latent), (latent, GRID)):
        rows = Neighbourhood(grid_in, grid_out).neighbours_per_row()
        bounds = [part * len(rows) // 3 for part in range(4)]
        expected += [rows[a:b].sum() for a, b in itertools.pairwise(bounds)]
    assert list(cost.pairs) == expected.tolist()
    assert cost.imbalance == pytest.approx(expected.max() / expected.mean())


@pytest.mark.parametrize("sizes", [(1, 1, 7), (1, 3, 3)])
def test_the_busiest_process_is_that_of_all_where_cuts_are_uneven(sizes):
    config = compose_training([*TINY, "model.embed_channels=8"])
    grid, size = Grid("equiangular", 13, 24), sizes[1] * sizes[2]
    costs = [step_cost(config, grid, ProcessMesh.on_paper(*sizes, rank=rank)) for rank in range(size)]
    found = busiest(config, grid, sizes)
    assert found.total == pytest.approx(max(cost.total for cost in costs), rel=0.05)
    assert found.received == pytest.approx(max(cost.received for cost in costs), rel=0.1)


def test_layouts_are_all_that_grids_and_batch_allow():
    config = compose_training([*TINY, "data.batch_size=2"])
    found = {one.sizes for one in choices(config, Grid("equiangular", 9, 2), 4, None)}
    assert found == {(1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1)}  # not four of two columns, nor of two samples


def choice(sizes, *, received, total, pairs=(1, 1), fits=True) -> Choice:
    numbers = dict.fromkeys(("parameters", "weights", "gradients", "buckets", "optimizer", "batch"), 0)
    mesh = ProcessMesh.on_paper(*sizes)
    return Choice(sizes, Cost(mesh, **numbers, activations=total, received=received, largest=(), pairs=pairs), fits)


def test_the_layout_to_take_fits_is_balanced_and_receives_least():
    whole = choice((4, 1, 1), received=0, total=90, fits=False)
    uneven = choice((2, 2, 1), received=10, total=50, pairs=(3, 1))
    wide, narrow = (choice((1, 2, 2), received=n, total=40) for n in (20, 30))
    assert recommended([whole, uneven, narrow, wide]) is wide
    assert recommended([whole, uneven]) is uneven
    assert recommended([whole]) is None


def test_a_report_says_what_to_take_and_what_does_not_fit():
    text = report(LARGE, processes=2, memory="1GB")
    assert "SphericalTransformer on equiangular 181 x 360, latent legendre-gauss 60 x 120" in text
    assert "1 x 2 x 1" in text and text.splitlines()[-1].startswith("take mesh.data=1 mesh.polar=")
    assert "none fits into 1MB per process" in report(LARGE, processes=2, memory="1MB")
    assert "does not fit" in report([*LARGE, "mesh.polar=2"], memory="1 MB")


@pytest.mark.parametrize(
    ("overrides", "options", "words"),
    [
        (["data=era5"], {}, "name one .grid=era5_1deg. or files"),
        ([], {"memory": "lots"}, "--memory reads like 80GB"),
        ([], {"processes": 0}, "--processes must be at least 1"),
        ([], {"processes": 10**4 + 7}, "have no layout for"),
        (["mesh.polar=33"], {}, "mesh.polar=33, but grid.latent has only 16 rows"),
        (["model.num_heads=5"], {}, "num_heads=5 does not divide"),
        (["trainer.precision=8-true"], {}, "trainer.precision=8-true"),
        (["data.rollout_steps=0"], {}, "data.rollout_steps of train must be a whole number of at least 1"),
        (["data.rollout_steps=abc"], {}, "data.rollout_steps of train must be"),
        (["data.rollout_steps={train:[]}"], {}, "data.rollout_steps of train must be"),
        (["data.batch_size=0"], {}, "data.batch_size counts the samples"),
        (["data.batch_size=1.5"], {"processes": 2}, "data.batch_size counts the samples"),
        (["data.batch_size=2", "mesh.data=3"], {}, "lower mesh.data"),
        (["+nonsense=1"], {}, "nothing reads the setting nonsense"),
        (["model=none"], {}, "Could not find 'model/none'"),
    ],
)
def test_what_cannot_be_planned_is_a_line(overrides, options, words):
    with pytest.raises(ValueError, match=words) as error:
        report(overrides, **options)
    assert "\n" not in str(error.value)


def test_short_names_of_precision_are_those_of_lightning():
    for short, dtype in (("16", torch.float16), ("bf16", torch.bfloat16)):
        layer = torch.nn.Linear(2, 2)
        with in_precision(layer, short):
            assert layer(torch.ones(1, 2)).dtype == dtype and layer.weight.dtype == torch.float32


@pytest.mark.parametrize(("text", "expected"), [("80GB", 80e9), ("512MiB", 2**29), ("1.5 KB", 1500.0)])
def test_memory_is_read(text, expected):
    assert parsed_memory(text) == expected
