"""Variables that are sums over less than a step: summed over it, or refused; never every sixth value."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from small_archive import SPLITS, archive

from sfno_dist.data import DataError
from sfno_dist.data.datamodule import WeatherDataModule
from sfno_dist.data.samples import FieldReader
from sfno_dist.data.timeline import TimeStep

CASE = Path(__file__).parents[3] / "shared" / "data" / "reports" / "27_hourly_precipitation_six_hour_step"


def hourly(path: str, **changes) -> WeatherDataModule:
    options = {"splits": SPLITS, "step": "6 hours", "diagnostic": ["tp"], **changes}
    return WeatherDataModule(path, ["t2m"], **options)


def test_single_hours_at_a_step_of_six_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(DataError, match=r"a\.nc: tp is accumulated over 1 h, the step is 6 h.*sum_over_step=\[tp\]"):
        hourly(archive(tmp_path, hours=1)).setup()


def test_the_sum_over_each_step_is_that_of_its_hours(tmp_path):
    path = archive(tmp_path, hours=1)
    data = hourly(path, sum_over_step=["tp"])
    data.setup()
    with xr.open_dataset(path) as raw:
        tp, t2m = raw.tp.values, raw.t2m.values
    for batch in data._loader("train"):
        target = int((batch["times"][0, 1].item() - data.reader.dates[0].astype(int)) // 3600e9)
        fields = data.recipe.statistics.denormalise(batch["state"][0, 1].numpy())
        np.testing.assert_allclose(fields[1], tp[target - 5 : target + 1].sum(0), rtol=1e-4, atol=1e-8)
        np.testing.assert_allclose(fields[0], t2m[target], rtol=1e-6)
    assert data.batches["train"].sequences.min() == 5  # the sum of the first step begins with the first hour


def test_a_missing_hour_costs_the_samples_that_need_it(tmp_path):
    path = archive(tmp_path, hours=1)
    with xr.open_dataset(path) as data:
        data = data.load()
    data.isel(time=[n for n in range(len(data.time)) if n != 40]).to_netcdf(path)
    data = hourly(path, sum_over_step=["tp"])
    data.setup()
    hours = (data.reader.dates - data.reader.dates[0]) // np.timedelta64(1, "h")
    used = hours[data.batches["train"].sequences]
    assert not np.isin(used, np.arange(40, 46)).any() and np.isin([39, 46], used).all()


@pytest.mark.parametrize(("step", "words"), [("4 hours", "is summed over 6 h; a step is 4 h"), ("1 month", "by month")])
def test_sums_that_cannot_be_made_are_refused(tmp_path, step, words):
    reader = FieldReader(archive(tmp_path), ["tp"])
    with pytest.raises(DataError, match=words):
        reader.sum_over(TimeStep.parse(step), ["tp"])


@pytest.mark.skipif(not CASE.is_dir(), reason="the shared case of hourly precipitation is not here")
def test_the_published_case():
    reader = FieldReader(str(CASE / "a.nc"), ["tp"])
    with pytest.raises(DataError, match="accumulated over 1 h"):
        reader.sum_over(TimeStep(6, "hours"), [])
    reader.sum_over(TimeStep(6, "hours"), ["tp"])
    with np.load(CASE / "expected.npz") as expected:
        times, sums = expected["time"].astype("datetime64[s]"), expected["tp6"]
    places = np.flatnonzero(np.isin(reader.times, times))
    assert reader.complete[places].all()
    np.testing.assert_allclose(reader.read(places)[:, 0], sums, rtol=1e-6)
