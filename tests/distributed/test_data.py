"""The DataModule on several processes: tiles, statistics and errors are those of one process."""

import re

import numpy as np
import pytest
import torch
import xarray as xr
from small_archive import GRID, archive, everything

from distributed.ranks import run_ranks
from sfno_dist import Decomposition, ProcessMesh
from sfno_dist.data.recipe import Recipe
from sfno_dist.training.losses import area_means
from sfno_dist.training.metrics import AreaWeightedScores, MeanLoss


def on_each_rank(folder, path, sizes, changes):
    """What a process got: its place, statistics, batches, and what its checkpoint would hold."""
    mesh = ProcessMesh(*sizes, timeout_s=300)
    data = everything(folder, path, mesh=mesh, change_statistics=True, **changes)
    try:
        data.setup()
        batches = [data.on_before_batch_transfer(batch, 0) for batch in data._loader("validation")]
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    tile = Decomposition(data.recipe.grid, mesh)
    arrays = [{name: tensor.numpy() for name, tensor in batch.items()} for batch in batches]
    stored = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in _flat(data).items()}
    return (tile.rows, tile.columns), vars(data.recipe.statistics), arrays, stored


def _flat(data):
    stored = data.recipe.to_dict()
    return {**stored.pop("statistics", {}), **stored}


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    path = archive(folder)
    data = everything(folder, path, change_statistics=True)
    data.setup()
    return folder, path, data


@pytest.mark.parametrize("sizes", [(1, 2, 2), (3, 1, 1), (2, 1, 2)])
def test_statistics_and_batches_are_those_of_one_process(serial, sizes):
    folder, path, data = serial
    expected = list(data._loader("validation"))
    whole = vars(data.recipe.statistics)
    seen = [0] * len(expected)
    for result in run_ranks(int(np.prod(sizes)), on_each_rank, folder, path, sizes, {}):
        assert not isinstance(result, str), result
        (rows, columns), statistics, batches, stored = result
        for name in ("mean", "std", "change_std"):
            np.testing.assert_allclose(statistics[name], whole[name], rtol=1e-12)
        mine = whole["climatology"][..., rows, columns]
        np.testing.assert_allclose(statistics["climatology"], mine, rtol=1e-6)
        for step, (batch, all_of_it) in enumerate(zip(batches, expected, strict=True)):
            real = batch["weight"] > 0
            times = all_of_it["times"].numpy()
            order = [int(np.flatnonzero((times == t).all(axis=1))[0]) for t in batch["times"]]
            for name in ("state", "features", "valid"):
                part = all_of_it[name].numpy()[order][..., rows, columns]
                np.testing.assert_allclose(batch[name], part, rtol=2e-6, atol=2e-6)
            seen[step] += int(real.sum()) * batch["state"].shape[-1] * batch["state"].shape[-2]
        if stored:  # on the first process of each globe, which writes the checkpoint
            assert rows.start == columns.start == 0
            back, own = stored, _flat(data)
            assert np.array_equal(back["relief"], own["relief"].numpy())
            np.testing.assert_allclose(back["climatology"], own["climatology"].numpy(), rtol=1e-6)
    cells = data.recipe.grid.nlat * data.recipe.grid.nlon
    assert seen == [len(batch["weight"]) * cells for batch in expected]


@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 1, 1)])
@pytest.mark.parametrize("day", [2, 7])
def test_what_one_process_cannot_read_stops_all_with_the_same_words(tmp_path, sizes, day):
    """A value that only one tile holds, or a time that only one replica reads; in the statistics or in a batch."""
    path = archive(tmp_path)
    with xr.open_dataset(path) as data:
        data = data.load()
    data.t2m[4 * (day - 1) + 1, 3, 20] = np.inf
    data.to_netcdf(path)
    results = run_ranks(2, on_each_rank, tmp_path, path, sizes, {"batch_size": 2})
    when = f"2020-01-{day:02d}T06:00:00"
    assert results[0] == results[1]
    assert results[0].startswith(f"DataError: {path}: t2m has 1 of ") and when in results[0], results[0]


def test_a_recipe_from_tiles_makes_the_same_features(serial):
    folder, path, data = serial
    results = run_ranks(2, _stored_features, folder, path)
    now, target = (np.datetime64(t, "ns") for t in ("2020-01-05", "2020-01-05T06"))
    np.testing.assert_allclose(results[0], data.recipe.feature_fields(now, target), rtol=2e-6, atol=2e-6)
    assert results[1] is None


def _stored_features(folder, path):
    data = everything(folder, path, mesh=ProcessMesh(polar=2, timeout_s=300))
    data.setup()
    stored = data.recipe.to_dict()
    now, target = (np.datetime64(t, "ns") for t in ("2020-01-05", "2020-01-05T06"))
    return Recipe.from_dict(stored).feature_fields(now, target) if stored else None


def _scored(data, polar, azimuth):
    """This process's share of the masked loss, its scores, and the mean loss, of its samples on its tile."""
    mesh = ProcessMesh(data, polar, azimuth, timeout_s=300) if data else ProcessMesh()
    tile = Decomposition(GRID, mesh)
    forecast, target, climatology, places = torch.randn(
        4, 3, 2, 3, *GRID.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    weight = torch.ones(3)
    if mesh.data == 2:  # of three samples, and one that stands in
        mine = [[0, 1], [2, 0]][mesh.data_index]
        weight = torch.tensor([[1.0, 1.0], [1.0, 0.0]])[mesh.data_index]
        forecast, target, climatology, places = (x[mine] for x in (forecast, target, climatology, places))
    fields = (x[..., tile.rows, tile.columns] for x in (forecast, target, climatology, places > 0.3))
    forecast, target, climatology, valid = fields
    shares = torch.from_numpy(GRID.area_shares[tile.rows])
    means = area_means(forecast, target, shares, losses=("mse", "l1", "huber"), valid=valid, mesh=mesh)
    metric, loss = AreaWeightedScores((2, 3), shares, mesh=mesh), MeanLoss(mesh=mesh)
    for n in range(len(weight)):  # unevenly batched
        batch = slice(n, n + 1)
        metric.update(
            forecast[batch], target[batch], climatology[batch], valid=valid[batch], weight=weight[batch]
        )  # fmt: skip
        loss.update(means[batch].mean((1, 2)), weight[batch])
    scores = metric.compute()
    return {"means": means.numpy(), "loss": float(loss.compute()), **{k: v.numpy() for k, v in scores.items()}}


@pytest.mark.parametrize(("data", "polar", "azimuth"), [(1, 2, 2), (2, 1, 2)])
def test_losses_and_scores_of_tiles_and_replicas_are_those_of_one_process(data, polar, azimuth):
    whole = _scored(0, 1, 1)
    results = run_ranks(4, _scored, data, polar, azimuth)
    for result in results:
        for name in ("loss", "rmse", "bias", "acc"):
            np.testing.assert_allclose(result[name], whole[name], rtol=1e-12)
            np.testing.assert_array_equal(result[name], results[0][name])  # logged values must not differ
    if data == 1:
        np.testing.assert_allclose(sum(r["means"] for r in results), whole["means"], rtol=1e-12)


def _own_files(folder, kinds):
    mesh = ProcessMesh(*((2, 1) if kinds[0] == "replicas" else (1, 2)), timeout_s=300)
    data = everything(folder, str(folder / f"{kinds[1 + mesh.rank]}.nc"), mesh=mesh)
    try:
        data.setup()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("cut", ["replicas", "tiles"])
@pytest.mark.parametrize(
    ("other", "words"), [("short", "times 40 from .* and 39 from"), ("units", "'K'.* and .*'degC'")]
)
def test_processes_that_find_other_files_are_told_alike(tmp_path, cut, other, words):
    path = archive(tmp_path)
    with xr.open_dataset(path) as data:
        data.isel(time=slice(-1)).to_netcdf(tmp_path / "short.nc")
        data.assign(t2m=data.t2m.assign_attrs(units="degC")).to_netcdf(tmp_path / "units.nc")
    results = run_ranks(2, _own_files, tmp_path, (cut, "a", other))
    assert results[0] == results[1]
    assert re.match(f"DataError: processes found different data: .*{words}", results[0]), results[0]
