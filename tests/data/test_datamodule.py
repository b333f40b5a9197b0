"""Batches: what they hold, and tiles of them that put together are the batch of one process."""

import dataclasses

import numpy as np
import pytest
import torch
import xarray as xr
from small_archive import GRID, LAND, SPLITS, archive, everything

from sfno_dist import Decomposition, ProcessMesh
from sfno_dist.data import DataError
from sfno_dist.data.datamodule import WeatherDataModule
from sfno_dist.data.ledger import LEDGER
from sfno_dist.data.samples import FieldReader

FIELDS = ("state", "features", "climatology", "valid")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("archive")


@pytest.fixture(scope="module")
def path(folder):
    return archive(folder)


@pytest.fixture(scope="module")
def serial(folder, path):
    data = everything(folder, path)
    data.setup()
    return data


def all_batches(data: WeatherDataModule, split: str = "train") -> list[dict]:
    return list(data._loader(split))


@pytest.mark.parametrize(
    ("polar", "azimuth", "balance"), [(2, 2, "count"), (3, 1, "count"), (1, 3, "count"), (4, 3, "work")]
)
def test_tiles_put_together_are_the_batch_of_one_process(folder, path, serial, polar, azimuth, balance):
    expected = {split: all_batches(serial, split) for split in ("train", "validation")}
    for place in range(polar * azimuth):
        mesh = ProcessMesh.on_paper(1, polar, azimuth, rank=place, row_balance=balance)
        data = everything(folder, path, mesh=mesh)
        data.setup()
        tile = Decomposition(GRID, mesh)
        for split, batches in expected.items():
            for mine, whole in zip(all_batches(data, split), batches, strict=True):
                assert mine.keys() == whole.keys()
                for name in mine:
                    part = whole[name][..., tile.rows, tile.columns] if name in FIELDS else whole[name]
                    assert torch.equal(mine[name], part), name


def test_a_tile_asks_for_its_own_rows_and_columns_alone(folder, path, monkeypatch):
    from sfno_dist.data.source import SourceFile

    asked = set()
    read = SourceFile.read

    def spy(self, wanted, times, rows, columns, **options):
        asked.update((name, tuple(rows), tuple(columns)) for name in wanted)
        return read(self, wanted, times, rows, columns, **options)

    mesh = ProcessMesh.on_paper(1, 3, 2, rank=3)
    reader = FieldReader(path, ["t2m", "sst"], missing=["sst"], mesh=mesh)
    assert len(reader.times) == 40
    monkeypatch.setattr(SourceFile, "read", spy)
    reader.read([0, 5])
    rows, columns = (tuple(range(s.start, s.stop)) for s in (reader.tile.rows, reader.tile.columns))
    assert asked == {("t2m", rows, columns), ("sst", rows, columns)} and len(rows) < 6 and len(columns) == 11


@pytest.mark.parametrize("count", [2, 3])
def test_replicas_share_the_batches_of_one_process(folder, path, serial, count):
    expected = all_batches(serial)
    parts = []
    for rank in range(count):
        data = everything(folder, path, mesh=ProcessMesh.on_paper(count, 1, 1, rank=rank))
        data.setup()
        parts.append(all_batches(data))
    for step, whole in enumerate(expected):
        for name in whole:
            if name != "weight":
                together = [part[step][name][part[step]["weight"] > 0] for part in parts]
                assert torch.equal(torch.cat(together), whole[name]), name


def test_a_sample_is_what_it_says(serial, path):
    batch = next(iter(serial.val_dataloader()))
    recipe, (now, target) = serial.recipe, batch["times"][0].numpy().astype("datetime64[ns]")
    assert target - now == np.timedelta64(6, "h")
    with xr.open_dataset(path) as data:
        fields = [data[name].sel(time=target).values for name in ("t2m", "z500", "sst", "tp")]
        before = data.sst.sel(time=now).values
    physical = recipe.statistics.denormalise(batch["state"][0, 1].numpy())
    np.testing.assert_allclose(physical[0], fields[0], rtol=1e-6)
    np.testing.assert_allclose(physical[2][~LAND], fields[2][~LAND], rtol=1e-6)
    np.testing.assert_allclose(physical[2][LAND], 271.5, rtol=1e-6)
    np.testing.assert_allclose(physical[3], fields[3], rtol=1e-4, atol=1e-9)
    valid = batch["valid"][0, 1].numpy()
    assert np.array_equal(valid[2], ~LAND) and valid[[0, 1, 3]].all()
    features = batch["features"][0, 0].numpy()
    assert len(features) == recipe.feature_channels and np.array_equal(features[-1], ~np.isnan(before))
    assert recipe.in_channels == 3 + len(features) and recipe.out_channels == 4


def test_prescribed_variables_enter_at_the_start_of_each_step(folder, path):
    data = everything(
        folder, path, variables=["t2m"], diagnostic=[], prescribed=["z500"], features=[], fill={}, mask_channels=[],
        log_epsilon={}, relief=None, land_mask=None,
    )  # fmt: skip
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert batch["state"].shape[1:3] == (3, 1) and batch["features"].shape[1:3] == (2, 1)
    times = batch["times"].numpy().astype("datetime64[ns]")
    with xr.open_dataset(path) as raw:
        expected = raw.z500.sel(time=xr.DataArray(times[:, :2], dims=("b", "t"))).values
    mean, std = data.recipe.statistics.mean[1], data.recipe.statistics.std[1]
    np.testing.assert_allclose(batch["features"][:, :, 0], (expected - mean) / std, atol=1e-4)


def test_rollouts_stay_within_their_split_and_no_test_field_enters_before(folder, path):
    """With the test period first, whose last field must not start a training sample."""
    splits = {"train": ["2020-01-05", "2020-01-07"], "validation": ["2020-01-08", "2020-01-10"]}
    splits["test"] = ["2020-01-01", "2020-01-04"]
    data = everything(folder, path, splits=splits, rollout_steps=3)
    data.setup()
    for split, days in (("train", (5, 7)), ("validation", (8, 10)), ("test", (1, 4))):
        times = data.reader.times[data.batches[split].sequences]
        assert np.all(np.diff(times, axis=1) == np.timedelta64(6, "h")) and times.shape[1] == 4
        dates = (times.astype("datetime64[D]") - np.datetime64("2020-01-01")).astype(int) + 1
        assert dates[:, 1:].min() >= days[0] and dates[:, 1:].max() <= days[1]
    starts = data.reader.times[data.batches["train"].sequences[:, 0]]
    assert starts.min() == np.datetime64("2020-01-05")  # not 2020-01-04T18, of the test period
    starts = data.reader.times[data.batches["validation"].sequences[:, 0]]
    assert starts.min() == np.datetime64("2020-01-07T18")  # known at the time


def test_the_trainer_lengthens_rollouts_between_epochs(folder, path):
    data = everything(folder, path, num_workers=1)
    data.setup()
    loader = data.train_dataloader()
    assert next(iter(loader))["state"].shape[1] == 3
    data.set_rollout_steps(4)
    loader.sampler.set_epoch(1)
    batch = next(iter(loader))
    assert batch["state"].shape[1] == 5 and batch["features"].shape[1] == 4


@pytest.mark.parametrize("kind", ["netcdf", "zarr"])
def test_workers_give_the_same_batches_as_none(tmp_path, kind):
    path = archive(tmp_path, kind=kind)
    batches, counts = [], []
    for workers in (0, 2):
        data = everything(tmp_path, path, num_workers=workers)
        data.setup()
        data.reader.read([0])  # handles that the parent has used
        LEDGER.clear()
        batches.append(all_batches(data))
        counts.append(LEDGER.total)
    assert counts[0] == counts[1] and counts[0].reads > 0
    for alone, worker in zip(*batches, strict=True):
        assert alone.keys() == worker.keys() and all(torch.equal(alone[name], worker[name]) for name in alone)


def test_statistics_are_kept_under_what_they_depend_on(tmp_path):
    path = archive(tmp_path)
    cache = tmp_path / "cache"

    def mean(**changes) -> np.ndarray:
        data = everything(tmp_path, path, statistics_cache=str(cache), **changes)
        data.setup()
        return data.recipe.statistics

    first = mean()
    (file,) = cache.iterdir()
    stamp = file.stat().st_mtime_ns
    again = mean()
    assert file.stat().st_mtime_ns == stamp and np.array_equal(first.climatology, again.climatology, equal_nan=True)
    assert np.array_equal(first.mean, again.mean) and np.array_equal(first.std, again.std)
    mean(splits={**SPLITS, "train": ["2020-01-01", "2020-01-05"]})
    mean(log_epsilon={"tp": 1e-4})
    assert len(list(cache.iterdir())) == 3
    with xr.open_dataset(path) as data:
        data = data.load()
    (data + 1.0).assign(tp=data.tp).to_netcdf(path)  # a file of the same name
    assert mean().mean[0] == pytest.approx(first.mean[0] + 1.0) and len(list(cache.iterdir())) == 4
    for file in cache.iterdir():
        file.write_bytes(b"cut")
    assert mean().mean[0] == pytest.approx(first.mean[0] + 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fill": {}, "mask_channels": []}, r"sst has .* values NaN .*"),
        ({"fill": {"q": 0.0}}, r"data\.fill names q"),
        ({"mask_channels": ["t2m"]}, r"data\.mask_channels names t2m, which data\.fill does not"),
        ({"diagnostic": ["t2m", "tp"]}, r"t2m: named twice"),
        ({"features": ["moon"]}, r"unknown feature 'moon'"),
        ({"land_mask": None}, r"asks for 'land_mask'"),
        ({"batch_size": 0}, r"data\.batch_size"),
        ({"rollout_steps": 40}, r"no 41 times 6 hours apart end in the train period"),
        ({"log_epsilon": {"t2m": -1.0}}, r"log_epsilon must be positive"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, path, changes, words):
    with pytest.raises(DataError, match=words):
        everything(folder, path, **changes).setup()


def test_a_negative_amount_has_no_log(tmp_path):
    path = archive(tmp_path)
    with xr.open_dataset(path) as data:
        data = data.load()
    data.tp[30, 4, 5] = -1.0
    data.to_netcdf(path)
    data = everything(tmp_path, path)
    data.setup()
    (failed,) = [b["failure"] for b in all_batches(data, "validation") if "failure" in b][:1]
    assert "tp is -1 at 2020-01-08T12:00:00, which has no log" in failed


def test_a_recipe_with_every_option_survives_a_checkpoint(serial, tmp_path):
    torch.save(serial.recipe.to_dict(), tmp_path / "r.pt")
    back = type(serial.recipe).from_dict(torch.load(tmp_path / "r.pt", weights_only=True))
    for field in dataclasses.fields(back):
        if field.name not in ("statistics", "relief", "land_mask"):
            assert getattr(back, field.name) == getattr(serial.recipe, field.name), field.name
    now, target = (np.datetime64(t, "ns") for t in ("2020-01-05", "2020-01-05T06"))
    assert np.array_equal(back.feature_fields(now, target), serial.recipe.feature_fields(now, target))
