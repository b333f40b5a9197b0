"""Models' own calendars through the DataModule: no pair across a gap, no date moved, months whole."""

import cftime
import numpy as np
import pytest
import xarray as xr
from small_archive import GRID

from sfno_dist.data.datamodule import WeatherDataModule
from sfno_dist.data.timeline import TimeStep, in_calendar, sequences


def model_year(folder, calendar: str, step: str) -> str:
    """A year and a half of t in a model's calendar, daily or monthly."""
    units = "days since 1999-07-01"
    counts = np.arange(540.0) if step == "1 day" else None
    if counts is None:
        months = [cftime.datetime(1999 + m // 12, m % 12 + 1, 16, calendar=calendar) for m in range(6, 24)]
        counts = cftime.date2num(months, units, calendar)
    noise = np.random.default_rng(0).standard_normal((len(counts), *GRID.shape)).astype("f4")
    data = xr.Dataset(
        {"t": (("time", "lat", "lon"), noise, {"units": "K"})},
        {"time": ("time", counts, {"units": units, "calendar": calendar})}
        | {"lat": GRID.latitudes_degrees, "lon": GRID.longitudes_degrees},
    )
    data.to_netcdf(folder / "a.nc")
    return str(folder / "a.nc")


@pytest.mark.parametrize(("calendar", "february"), [("noleap", 28), ("360_day", 30), ("all_leap", 29)])
def test_days_of_a_model_calendar(tmp_path, calendar, february):
    path = model_year(tmp_path, calendar, "1 day")
    splits = {"train": ["1999", "1999-12"], "validation": ["2000-01", "2000-02"], "test": ["2000-03", "2000-04"]}
    data = WeatherDataModule(path, ["t"], splits=splits, features=["year_phase", "cos_zenith"])
    data.setup()
    assert data.recipe.step == TimeStep(1, "days")
    length = 30 if calendar == "360_day" else 31
    assert len(data.batches["validation"].sequences) == length + february  # the first starts on the last of December
    batch = next(iter(data.train_dataloader()))
    assert np.isfinite(batch["features"].numpy()).all()


def test_months_of_a_model_calendar(tmp_path):
    path = model_year(tmp_path, "360_day", "1 month")
    splits = {"train": ["1999", "1999"], "validation": ["2000-01", "2000-06"], "test": ["2000-07", "2000-12"]}
    data = WeatherDataModule(path, ["t"], splits=splits)
    data.setup()
    assert data.recipe.step == TimeStep(1, "months") and data.batches["validation"].sequences.shape == (6, 2)


@pytest.mark.parametrize("calendar", ["noleap", "360_day"])
def test_steps_agree_with_the_calendar(calendar):
    start = cftime.datetime(2000, 1, 30, 6, calendar=calendar)
    hours = TimeStep(6, "hours")
    times = np.array([hours.advance(start, n) for n in (0, 1, 2, 4, 5, 6)])
    assert sequences(times, hours, 1).tolist() == [[0, 1], [1, 2], [3, 4], [4, 5]]
    assert TimeStep(1, "months").advance(start, 1) == cftime.datetime(
        2000, 2, 28 if calendar == "noleap" else 30, 6, calendar=calendar
    )
    assert TimeStep(2, "months").advance(start, -1) == cftime.datetime(1999, 11, 30, 6, calendar=calendar)
    assert in_calendar(np.datetime64("2000-01-30T06", "ns"), times) == start
