"""Forecasts on one process: right by hand, the same in any order of initial times, and whole or not there."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
import xarray as xr
from forecasts.small_checkpoint import checkpoint, fields, same
from small_archive import LAND

from sfno_dist import Grid, ProcessMesh
from sfno_dist.data import DataError
from sfno_dist.data.barotropic import RADIUS
from sfno_dist.data.samples import FieldReader
from sfno_dist.forecasts import Request, forecast, store
from sfno_dist.forecasts.command import run
from sfno_dist.forecasts.ensemble import LENGTH, random_field
from sfno_dist.forecasts.rollout import Rollout
from sfno_dist.training import checkpoint as checkpoints
from sfno_dist.training.checkpoint import CheckpointError
from sfno_dist.training.config import ConfigError

INITS = ["2020-01-03T06", "2020-01-05", "2020-01-09T00"]
ONE = ProcessMesh()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("checkpoint"))


def made(trained, path, inits=INITS, steps=3, **choice) -> xr.Dataset:
    forecast(Request(str(trained[0]), str(path), inits, steps=steps, **choice), ONE)
    return fields(path)


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
    return made(trained, tmp_path_factory.mktemp("whole") / "f.nc")


def by_hand(loaded, reader, index, steps):
    """A rollout written out: state, then features, z500 of the data, and the mask of sst   [steps, V, H, W]"""
    recipe, first = loaded.recipe, reader(index)
    state, results = None, []
    for n in range(steps):
        raw = reader(index + n)
        now, target = reader.dates[index + n : index + n + 2]
        normalised = recipe.statistics.normalise(np.where(np.isnan(raw), 271.5, raw))
        state = normalised[:2] if state is None else state
        inputs = [state, recipe.feature_fields(now, target), normalised[3:], ~np.isnan(raw[1:2])]
        with torch.no_grad():
            out = loaded.model(torch.from_numpy(np.concatenate(inputs).astype(np.float32))[None])[0].numpy()
        state = state + out[:2]
        filled = recipe.statistics.normalise(np.full((2, 1, 1), 271.5, np.float32))[1]
        state[1] = np.where(np.isnan(first[1]), filled, state[1])
        results.append(recipe.statistics.denormalise(np.concatenate([state, out[2:]])))
    return np.stack(results)


def test_every_step_is_that_of_a_rollout_by_hand(trained, whole):
    loaded = checkpoints.load(trained[0])
    reader = FieldReader.of(loaded.recipe, [trained[1]])
    for i, index in enumerate((9, 16, 32)):
        expected = by_hand(loaded, reader, index, 3)
        for v, name in enumerate(("t2m", "sst", "tp")):
            values = expected[:, v].copy()
            values[:, LAND] = np.where(name == "sst", np.nan, values[:, LAND])
            np.testing.assert_allclose(whole[name].values[i, 1:], values, rtol=1e-5, atol=1e-9)
        np.testing.assert_array_equal(whole.t2m.values[i, 0], reader(index)[0])


def test_a_file_says_what_it_holds(whole, trained):
    assert whole.t2m.dims == ("init_time", "step", "lat", "lon") and whole.sizes["step"] == 4
    assert whole.t2m.attrs == {"long_name": "2m temperature", "standard_name": "air_temperature", "units": "K"}
    assert whole.attrs["Conventions"] == "CF-1.10" and json.loads(whole.attrs["request"])["steps"] == 3
    names = {axis: whole[axis].attrs["standard_name"] for axis in ("init_time", "time", "lead_time", "lat", "lon")}
    assert list(names.values()) == [
        "forecast_reference_time", "time", "forecast_period", "latitude", "longitude"
    ]  # fmt: skip
    leads = np.arange(4) * np.timedelta64(6, "h")
    np.testing.assert_array_equal(whole.lead_time.values, leads)
    np.testing.assert_array_equal(whole.time.values, whole.init_time.values[:, None] + leads)
    assert whole.t2m.encoding["zlib"] and whole.t2m.encoding["chunksizes"] == (1, 1, 13, 22)


@pytest.mark.parametrize("name", ["f.zarr", "f.nc"])
def test_one_initial_time_after_the_other_gives_the_same_file(trained, whole, tmp_path, name):
    for count in (1, 3, 3):
        result = made(trained, tmp_path / name, INITS[:count], append=True)
        assert result.sizes["init_time"] == count
    assert same(result, whole)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_second_forecast_replaces_the_first(trained, tmp_path):
    made(trained, tmp_path / "f.zarr")
    assert made(trained, tmp_path / "f.zarr", INITS[1:2], steps=1).sizes["init_time"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["f.zarr"]


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("2020-01-03/2020-01-03", [8, 9, 10, 11]),
        ("2020-01-02T18/2020-01-04/24hours", [7, 11, 15]),
        ("2020-01-08/2020-01-08/12 hours", [28, 30]),
        ("2020-01-02T18/2020-01-04/1month", [7]),
    ],
)
def test_a_period_names_all_its_times(trained, tmp_path, init, expected):
    result = made(trained, tmp_path / "f.nc", [init], steps=1)
    hours = (result.init_time.values - np.datetime64("2020-01-01")) // np.timedelta64(6, "h")
    assert hours.tolist() == expected


def test_perturbations_have_one_variance_everywhere_and_one_correlation_in_all_directions():
    grid = Grid("equiangular", 61, 120)
    draws = np.stack([random_field(grid, (0, key)) for key in range(300)])
    variance, mean = draws.var(0), draws.mean(0)
    assert variance.mean() == pytest.approx(1.0, abs=0.02) and np.abs(mean).max() < 0.25
    assert variance.min() > 0.6 and variance.max() < 1.5  # within 6 deviations of 300 draws, poles too
    assert np.abs((draws * grid.area_shares).sum((1, 2))).max() < 1e-8  # globe means stay
    for row, column in ((30, 0), (10, 7), (50, 60)):
        angle = np.arccos(np.clip(np.tensordot(grid.positions[:, row, column], grid.positions, 1), -1.0, 1.0))
        found = (draws * draws[:, row, column][:, None, None]).mean(0)
        expected = np.exp(-0.5 * (angle * RADIUS / LENGTH) ** 2)
        assert np.abs(found - expected).max() < 0.3 and np.sqrt(((found - expected) ** 2).mean()) < 0.07


def test_members_differ_by_smooth_fields_of_the_spread_asked_for(trained, whole, tmp_path):
    ensemble = made(trained, tmp_path / "a.nc", INITS[:2], steps=1, members=12, perturbation=0.2, seed=4)
    assert ensemble.t2m.dims == ("init_time", "step", "member", "lat", "lon")
    spread = checkpoints.load(trained[0]).recipe.statistics.std[0]
    start = (ensemble.t2m.isel(step=0) - whole.t2m.isel(init_time=slice(2), step=0)) / (0.2 * spread)
    area = np.cos(np.radians(ensemble.lat))
    assert float((start**2).weighted(area).mean()) == pytest.approx(1.0, abs=0.15)
    assert abs(float(start.weighted(area).mean())) < 0.03
    others = [start.isel(member=m, init_time=i).values.ravel() for i in range(2) for m in range(12)]
    correlations = np.corrcoef(others) - np.eye(24)
    assert np.abs(correlations).max() < 0.5  # each is drawn for itself
    assert np.isnan(ensemble.sst.values[..., LAND]).all() and np.isfinite(ensemble.sst.values[..., ~LAND]).all()
    again = made(trained, tmp_path / "b.nc", INITS[1:2], steps=1, members=12, perturbation=0.2, seed=4)
    assert np.array_equal(again.t2m.values[0], ensemble.t2m.values[1])
    other = made(trained, tmp_path / "b.nc", INITS[1:2], steps=1, members=12, perturbation=0.2, seed=5)
    assert not np.allclose(other.t2m.values[0, 0], ensemble.t2m.values[1, 0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inits": ["2020-02-01"]}, "no data at 2020-02-01T00:00; the nearest time is 2020-01-10T18:00, the data run"),
        ({"inits": ["2020-01-10T12"]}, "no data at 2020-01-11T00.*; the model takes z500 from the data at every step"),
        ({"inits": ["soon"]}, "--init: a time reads like"),
        ({"inits": ["NaT"]}, "--init: a time reads like"),
        ({"inits": [""]}, "--init: a time reads like"),
        ({"inits": ["2604-07-23T23:34:33"]}, "no data at 2604-07-23T23:34; the nearest time is 2020-01-10T18:00"),
        ({"steps": 10**6}, "--steps 1000000: a forecast from 2020-01-03T06:00 ends by 2261"),
        ({"inits": ["2021/2022"]}, "no data from 2021 to 2022"),
        ({"inits": ["2604-07-20/2604-07-26"]}, "--init 2604-07-20/2604-07-26: years run from 1678 to 2261"),
        ({"inits": ["2020/"]}, "--init: a time reads like"),
        ({"inits": ["2020-01-01/2020-01-02/often"]}, "a time step reads like"),
        ({"steps": 0}, "at least 1 step, got --steps 0"),
        ({"members": 0}, "at least 1 member, got --members 0"),
        ({"members": 2, "perturbation": -1.0}, "--perturbation is a share"),
        ({"output": "nowhere/f.nc"}, "the folder nowhere does not exist"),
        ({"output": "folder"}, "is a folder; name a file"),
        ({"output": "foreign.nc"}, "foreign.nc: is no forecast that sfno-dist wrote"),
        ({"output": "pipe"}, "pipe: is no regular file"),
        ({"output": "foreign.zarr"}, "foreign.zarr: .*no forecast that sfno-dist wrote"),
        ({"data": ["knots.nc"]}, "t2m is in 'knots', the checkpoint was trained on 'K'"),
        ({"data": ["knots.nc"], "output": "knots.nc"}, "knots.nc: is no forecast that sfno-dist wrote"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_met_is_refused_and_leaves_nothing(trained, tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    xr.Dataset({"a": ("x", [1.0])}).to_zarr("foreign.zarr", consolidated=False)
    with xr.open_dataset(trained[1]) as data:
        data.t2m.attrs["units"] = "knots"
        data.to_netcdf("knots.nc")
    xr.Dataset({"a": ("x", [1.0])}).to_netcdf("foreign.nc")
    os.mkfifo("pipe")
    before = sorted(tmp_path.rglob("*"))
    options = {"checkpoint": str(trained[0]), "output": "f.nc", "inits": INITS, **change}
    with pytest.raises(DataError, match=words) as error:
        forecast(Request(**{"steps": 3, **options}), ONE)
    assert "\n" not in str(error.value) and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("picture", "words"), [("no/p.png", "does not exist"), ("p.nc", "ends with"), ("d.png", "is a")]
)
def test_a_picture_that_cannot_be_drawn_is_told_before_the_forecast(trained, tmp_path, monkeypatch, picture, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.png").mkdir()
    with pytest.raises(ConfigError, match=f"--plot {picture}: .*{words}"):
        run(Request(str(trained[0]), "f.nc", INITS), ONE, command=[], picture=picture)
    assert [path.name for path in tmp_path.iterdir()] == ["d.png"]


def test_what_ended_before_its_first_step_does_not_stand_in_the_way_of_another(trained, whole, tmp_path, monkeypatch):
    def broken(self, *arguments):
        raise DataError("t2m has NaN")

    with monkeypatch.context() as patch:
        patch.setattr(Rollout, "__init__", broken)
        with pytest.raises(DataError, match="t2m has NaN"):
            made(trained, tmp_path / "f.nc", INITS[:1])
    assert same(made(trained, tmp_path / "f.nc"), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["f.nc"]


def test_an_interruption_is_a_line_and_goes_on(trained, whole, tmp_path, monkeypatch, capsys):
    advance = Rollout.advance

    def interrupted(self, features):
        if self.trajectory.number == 1:
            raise KeyboardInterrupt
        advance(self, features)

    monkeypatch.setattr(Rollout, "advance", interrupted)
    with pytest.raises(SystemExit) as end:
        run(Request(str(trained[0]), str(tmp_path / "f.nc"), INITS, steps=3), ONE, command=[], picture=None)
    assert end.value.code == 130 and "interrupted; the same command goes on" in capsys.readouterr().err
    monkeypatch.setattr(Rollout, "advance", advance)
    assert same(made(trained, tmp_path / "f.nc"), whole)


def test_what_does_not_belong_together_is_not_appended(trained, tmp_path):
    made(trained, tmp_path / "f.nc", INITS[:1])
    for change, words in (({"steps": 2}, "steps 3, now it is 2"), ({"members": 2}, "members None, now it is 2")):
        with pytest.raises(DataError, match=words):
            made(trained, tmp_path / "f.nc", append=True, **change)
    assert made(trained, tmp_path / "f.nc", append=True).sizes["init_time"] == 3


def test_a_checkpoint_that_does_not_fit_together_is_refused(trained, tmp_path):
    stored = torch.load(trained[0])
    stored["sfno_dist"]["model"]["depth"] = 2
    torch.save(stored, tmp_path / "c.ckpt")
    with pytest.raises(CheckpointError, match="does not fit together"):
        forecast(Request(str(tmp_path / "c.ckpt"), str(tmp_path / "f.nc"), INITS), ONE)


@pytest.mark.parametrize("length", [0, 1, 1000, -1])
def test_a_checkpoint_that_was_cut_short_is_a_line(trained, tmp_path, length):
    (tmp_path / "c.ckpt").write_bytes(trained[0].read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"c\.ckpt: not a readable checkpoint") as error:
        forecast(Request(str(tmp_path / "c.ckpt"), str(tmp_path / "f.nc"), INITS), ONE)
    assert "\n" not in str(error.value) and [path.name for path in tmp_path.iterdir()] == ["c.ckpt"]


def test_a_full_disk_is_a_line_and_the_forecast_goes_on_afterwards(trained, whole, tmp_path, monkeypatch):
    written = store.Fields.write
    calls = iter(range(1000))

    def full(self, v, place, field):
        if next(calls) == 17:
            raise OSError(28, "No space left on device")
        written(self, v, place, field)

    monkeypatch.setattr(store.Fields, "write", full)
    with pytest.raises(DataError, match=r"cannot be written or read .No space left on device.; .*goes on from there"):
        made(trained, tmp_path / "f.nc")
    assert [path.name for path in tmp_path.iterdir()] == [".f.nc.partial"]
    monkeypatch.setattr(store.Fields, "write", written)
    with pytest.raises(DataError, match=r"an unfinished forecast with steps 3, now it is 2.*rm -r"):
        made(trained, tmp_path / "f.nc", steps=2)
    assert same(made(trained, tmp_path / "f.nc"), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["f.nc"]


def test_what_is_killed_as_it_writes_netcdf_leaves_one_folder_and_goes_on(trained, whole, tmp_path, monkeypatch):
    replace, left = os.replace, []

    def killed(source, target):
        if str(target).endswith("f.nc"):
            left.extend(path.name for path in tmp_path.iterdir())
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        made(trained, tmp_path / "f.nc")
    monkeypatch.setattr(os, "replace", replace)
    assert left == [".f.nc.partial"]
    assert same(made(trained, tmp_path / "f.nc"), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["f.nc"]


def test_what_is_killed_as_it_clears_up_leaves_no_forecast_with_holes(trained, whole, tmp_path, monkeypatch):
    removed = shutil.rmtree

    def killed(path, **choice):
        if (path / "t2m").exists():
            removed(path / "t2m" / "c" / "0")  # one of the initial times
            raise KeyboardInterrupt
        removed(path, **choice)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        made(trained, tmp_path / "f.nc")
    monkeypatch.setattr(shutil, "rmtree", removed)
    assert same(fields(tmp_path / "f.nc"), whole)
    assert same(made(trained, tmp_path / "f.nc"), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["f.nc"]


def test_values_that_blow_up_are_told(trained, tmp_path, capsys):
    stored = torch.load(trained[0])
    stored["state_dict"]["model.head.weight"] *= 1e30
    torch.save(stored, tmp_path / "c.ckpt")
    forecast(Request(str(tmp_path / "c.ckpt"), str(tmp_path / "f.nc"), INITS[:1], steps=4), ONE)
    assert capsys.readouterr().err.count("is no finite number after step") == 1
