"""Scores of whole files against the same definitions written out over all times at once, and known values."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from forecast_files import GRID, UNITS, axes, forecast_of, truth_file

from sfno_dist.data import DataError
from sfno_dist.scores.climatology import FileClimatology, PeriodClimatology
from sfno_dist.scores.definitions import REGIONS, region_weights
from sfno_dist.scores.forecasts import Forecasts
from sfno_dist.scores.truth import Truth
from sfno_dist.scores.verify import verify

NAVY = Path(__file__).parents[2] / "data" / "navy_winds_monthly_2.5deg.nc"


def score(forecast, truth, climatology=None, variables=None) -> xr.Dataset:
    forecasts = Forecasts(forecast, variables)
    observed = Truth([str(truth)], forecasts)
    names = [variable.name for variable in forecasts.variables]
    if isinstance(climatology, tuple):
        wanted = np.array([place.valid for place in forecasts.places])
        climatology = PeriodClimatology(observed, names, *climatology, wanted)
    elif climatology is not None:
        climatology = FileClimatology(str(climatology), forecasts)
    return verify(forecasts, observed, climatology)


def test_persistence_and_climatology_of_the_winds_are_the_known_ones(tmp_path):
    """Targets of 1991-92 one month ahead, climatology of 1982-89: 2.360, 1.851, 2.110, 1.694 m/s."""
    with xr.open_dataset(NAVY) as data:
        data = data.rename(TIME="time", FNOCY="lat", FNOCX="lon").load().drop_encoding()
    for n in range(107, 131):  # the forecast is nothing but 0, to be told from its baselines
        valid = 0.0 * data.isel(time=[n, n + 1]).drop_vars("time")
        valid = valid.assign_coords(init_time=data.time[n].values, time=data.time[n : n + 2].values)
        for name in ("UWND", "VWND"):
            valid[name].attrs["units"] = data[name].attrs["units"]
        valid.to_netcdf(tmp_path / f"f{n}.nc")
    result = score(str(tmp_path / "f*.nc"), NAVY, ("1982", "1989"))
    assert result.lead_time.values.tolist() == [0, 1] and result.lead_time.attrs["units"] == "months"
    assert result.samples.values.tolist() == [24, 24]
    one = result.rmse.sel(lead_time=1, region="globe")
    for name, persistence, climatology in (("UWND", 2.360, 2.110), ("VWND", 1.851, 1.694)):
        assert float(one.sel(variable=name, forecast="persistence")) == pytest.approx(persistence, abs=0.005)
        assert float(one.sel(variable=name, forecast="climatology")) == pytest.approx(climatology, abs=0.005)


@pytest.mark.parametrize("gaps", [False, True], ids=["whole", "gaps"])
def test_scores_are_the_means_over_all_times_at_once(tmp_path, gaps):
    truth = truth_file(tmp_path, gaps=gaps)
    forecast = forecast_of(truth, [0, 3, 10, 46], 3, members=4)  # the last runs beyond the truth
    forecast.to_netcdf(tmp_path / "f.nc")
    result = score(str(tmp_path / "f.nc"), truth)
    assert result.samples.values.tolist() == [4, 4, 3, 3]
    assert "2 of 16 forecast fields are not scored" in result.attrs["notes"]
    with xr.open_dataset(truth) as data:
        data = data.load()
    weights = xr.DataArray(region_weights(GRID), {"region": list(REGIONS), "lat": axes()["lat"]}, ("region", "lat"))
    for lead in range(4):
        inits = [n for n in (0, 3, 10, 46) if n + lead < 48]
        for name in UNITS:
            field = forecast[name].isel(lead_time=lead, init_time=range(len(inits))).astype("f8")
            observed, persistence = (
                data[name].isel(time=[n + step for n in inits]).rename(time="init_time").drop_vars("init_time")
                for step in (lead, 0)
            )
            field = field.drop_vars("init_time")

            def mean(x):
                return x.weighted(weights).mean(("lat", "lon")).mean("init_time").values

            error = field.mean("member") - observed
            chosen = {"variable": name, "lead_time": 6.0 * lead}
            one = result.sel(forecast="forecast", **chosen)
            np.testing.assert_allclose(one.rmse, np.sqrt(mean(error**2)), rtol=1e-6)
            np.testing.assert_allclose(one.mae, mean(abs(error)), rtol=1e-6)
            np.testing.assert_allclose(one.bias, mean(error), rtol=1e-6, atol=1e-9)
            spread = np.sqrt(mean(field.var("member", ddof=1).where(observed.notnull())))
            np.testing.assert_allclose(one.spread, spread, rtol=1e-6, atol=1e-9)
            pairs = abs(field - field.rename(member="other")).sum(("member", "other")) / (2 * 4 * 3)
            crps = abs(field - observed).mean("member") - pairs.where(observed.notnull())
            np.testing.assert_allclose(one.crps, mean(crps), rtol=1e-6, atol=1e-9)
            other = result.rmse.sel(forecast="persistence", **chosen)
            np.testing.assert_allclose(other, np.sqrt(mean((persistence - observed) ** 2)), rtol=1e-6)
    np.testing.assert_allclose(result.spread_skill[0, :, 1:], result.spread[0, :, 1:] / result.rmse[0, :, 1:])
    if gaps:
        assert np.isnan(result.rmse_map.sel(variable="t2m")[:, 3:6, 4:9]).all()
        assert float(result.coverage.sel(variable="t2m", region="globe").max()) < 1.0


def test_climatology_is_that_of_weatherbench(tmp_path):
    """61 days of falling weights around the ring of the year, day 366 filled with day 365, each hour for itself."""
    times = np.arange("2018-01-01", "2021-01-01", np.timedelta64(12, "h"), dtype="datetime64[ns]")
    values = 280.0 + np.random.default_rng(0).standard_normal((len(times), 5, 8)).astype("f4")
    grid = {"lat": np.linspace(90, -90, 5), "lon": np.arange(8) * 45.0}
    data = xr.Dataset({"t2m": (("time", "lat", "lon"), values, {"units": "K"})}, {"time": times, **grid})
    data.to_netcdf(tmp_path / "truth.nc")
    forecast = data.isel(time=[10]).rename(time="init_time").expand_dims(lead_time=[np.timedelta64(12, "h")])
    forecast.to_netcdf(tmp_path / "f.nc")
    truth = Truth([str(tmp_path / "truth.nc")], Forecasts(str(tmp_path / "f.nc")))
    wanted = np.array(["2021-01-02T12", "2021-07-14T00", "2020-12-31T00"], "datetime64[ns]")
    found = PeriodClimatology(truth, ["t2m"], "2018", "2020", wanted)
    stacked = np.full((2, 3, 366, 5, 8), np.nan)
    for time, field in zip(times, values, strict=True):
        day = time.astype("datetime64[D]")
        stacked[
            int(time != day.astype("datetime64[ns]")),
            int(str(day)[:4]) - 2018,
            int((day - np.datetime64(str(day)[:4])).astype(int)),
        ] = field
    stacked[:, :2, 365] = stacked[:, :2, 364]
    weights = 1.0 - abs(np.arange(-30, 31)) / 30.0
    for time, hour, day in zip(wanted, (1, 0, 0), (1, 194, 365), strict=True):
        window = stacked[hour][:, (day + np.arange(-30, 31)) % 366]  # [years, 61, H, W]
        expected = (window * weights[:, None, None]).sum((0, 1)) / (3 * weights.sum())
        np.testing.assert_allclose(found("t2m", time), expected, rtol=1e-6)
    assert not PeriodClimatology(truth, ["t2m"], "2018-01-01", "2018-01-20", wanted).has(wanted[1])


def test_acc_and_climatology_from_a_file(tmp_path):
    truth = truth_file(tmp_path)
    forecast_of(truth, [0, 5], 2).to_netcdf(tmp_path / "f.nc")
    field = np.random.default_rng(4).standard_normal((4, 366, *GRID.shape)) + 280.0
    dims = ("hour", "dayofyear", "latitude", "longitude")
    climatology = {  # rows and names as WeatherBench 2 has them
        "2m_temperature": (dims, field[:, :, ::-1].astype("f4"), {"units": "K"}),
        "geopotential": (
            (*dims[:2], "level", *dims[2:]),
            (field[:, :, None] + 5e4).astype("f4"),
            {"units": "m**2 s**-2"},
        ),
    }
    coordinates = {"latitude": axes()["lat"][::-1], "longitude": axes()["lon"], "level": [500]}
    coordinates |= {"hour": [0, 6, 12, 18], "dayofyear": np.arange(1, 367)}
    xr.Dataset(climatology, coordinates).to_netcdf(tmp_path / "c.nc")
    result = score(str(tmp_path / "f.nc"), truth, tmp_path / "c.nc")
    weights = region_weights(GRID)[0][:, None] + np.zeros(GRID.shape)
    with xr.open_dataset(truth) as data, xr.open_dataset(tmp_path / "f.nc") as forecast:
        found = []
        for i, place in enumerate((0 + 2, 5 + 2)):
            usual = field[place % 4, place // 4].astype("f4")
            anomalies = [x.values - usual for x in (forecast.t2m[i, 2], data.t2m[place])]
            products = [(weights * a * b).sum() for a, b in (anomalies, [anomalies[0]] * 2, [anomalies[1]] * 2)]
            found.append(products[0] / np.sqrt(products[1] * products[2]))
    one = result.acc.sel(variable="t2m", lead_time=12.0, region="globe")
    assert float(one.sel(forecast="forecast")) == pytest.approx(np.mean(found), rel=1e-5)
    assert np.isnan(one.sel(forecast="climatology"))
    assert result.level.sel(variable="z500") == 500 and np.isnan(result.level.sel(variable="t2m"))


def test_every_layout_of_the_same_forecast_has_the_same_scores(tmp_path):
    truth = truth_file(tmp_path)
    forecast = forecast_of(truth, [0, 3], 3, members=2)
    forecast.to_netcdf(tmp_path / "a.nc")
    expected = score(str(tmp_path / "a.nc"), truth)
    weatherbench = forecast.rename(
        init_time="time", lead_time="prediction_timedelta", lat="latitude", lon="longitude", member="number"
    )
    turned = weatherbench.isel(latitude=slice(None, None, -1)).roll(longitude=5, roll_coords=True)
    level = turned.z500.expand_dims(level=[500.0])
    turned = turned.drop_vars("z500").assign(z=level).transpose("longitude", "level", "time", ...)
    turned.z.attrs["units"] = UNITS["z500"]
    turned.to_zarr(tmp_path / "b.zarr", zarr_format=2)
    for n in range(2):  # as `sfno-dist forecast` writes: valid times, with the lead and the initial time beside them
        one = forecast.isel(init_time=n)
        one = one.assign_coords(time=("lead_time", one.init_time.values + one.lead_time.values))
        one.swap_dims(lead_time="time").to_netcdf(tmp_path / f"c{n}.nc")
    for paths, same in (("b.zarr", {"z500": "z500"}), ("c*.nc", {})):
        result = score(str(tmp_path / paths), truth)
        result = result.sel(variable=expected.variable)
        for name in ("rmse", "mae", "bias", "crps", "spread", "power", "bias_map"):
            np.testing.assert_allclose(result[name], expected[name], rtol=1e-6, atol=1e-12, err_msg=f"{paths} {same}")


def change(dataset: xr.Dataset, kind: str) -> xr.Dataset:
    if kind == "grid":
        return dataset.isel(lat=slice(None, None, 2), lon=slice(None, None, 2))
    if kind == "units":
        return dataset.assign(t2m=dataset.t2m.assign_attrs(units="degC"))
    if kind == "variable":
        return dataset.rename(t2m="cape")
    if kind == "times":
        return dataset.assign_coords(init_time=dataset.init_time + np.timedelta64(9000, "D"))
    if kind == "hours":
        return dataset.assign_coords(init_time=dataset.init_time + np.timedelta64(1, "h"))
    if kind == "no lead":
        return dataset.drop_vars("lead_time")
    if kind == "blown up":
        return dataset.assign(t2m=dataset.t2m.where(dataset.lead_time < np.timedelta64(6, "h"), np.inf))
    return dataset.assign(t2m=dataset.t2m.where(dataset.lead_time < np.timedelta64(6, "h")))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("grid", "is on grid equiangular 7 x 12, .* on equiangular 13 x 24; regrid"),
        ("units", "t2m is in 'degC', .* 'K'; convert"),
        ("variable", "no variable cape"),
        ("times", "has none of the times .* 2044-.*; it runs 2020-01-01T00:00 to 2020-01-12T18:00"),
        ("hours", "has none of the times"),
        ("no lead", "lead_time holds bare numbers"),
        ("blown up", "t2m is infinite in the forecast from 2020-01-01T00:00 for 2020-01-01T06:00"),
        ("NaN", "t2m is nowhere a number in the forecast from"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, kind, words):
    truth = truth_file(tmp_path)
    change(forecast_of(truth, [0, 3], 2), kind).to_netcdf(tmp_path / "f.nc")
    with pytest.raises(DataError, match=words) as found:
        score(str(tmp_path / "f.nc"), truth)
    assert "\n" not in str(found.value)


def test_what_is_absent_is_named(tmp_path):
    truth = truth_file(tmp_path)
    forecast = forecast_of(truth, [0, 3], 2)
    forecast = forecast.assign_coords(init_time=forecast.init_time - np.timedelta64(6, "h"))
    forecast.isel(lead_time=slice(1, None)).to_netcdf(tmp_path / "f.nc")
    result = score(str(tmp_path / "f.nc"), truth)
    notes = result.attrs["notes"].splitlines()
    assert notes[0] == "no persistence: the truth lacks initial times, such as 2019-12-31T18:00"
    assert notes[1].startswith("no climatology, and so no ACC") and notes[2].startswith("no spread")
    assert result.forecast.values.tolist() == ["forecast"] and "acc" not in result and "spread" not in result
    np.testing.assert_array_equal(result.crps, result.mae)


def test_a_field_that_loses_values_on_the_way_is_named(tmp_path):
    truth = truth_file(tmp_path)
    forecast = forecast_of(truth, [0, 3], 2)
    forecast.t2m[:, 2, :6] = np.nan
    forecast.to_netcdf(tmp_path / "f.nc")
    assert "t2m: the area scored falls from 100% to" in score(str(tmp_path / "f.nc"), truth).attrs["notes"]


def test_steps_and_sums_of_another_length_are_refused(tmp_path):
    """Daily forecasts against monthly truth; sums over an hour against those over six."""
    truth = truth_file(tmp_path)
    forecast_of(truth, [0, 3], 2).rename(t2m="tp").to_netcdf(tmp_path / "f.nc")
    with xr.open_dataset(truth) as data:
        hourly = (
            data.load()
            .rename(t2m="tp")
            .assign_coords(time=data.time.values[0] + np.arange(48) * np.timedelta64(1, "h"))
        )
    hourly.to_netcdf(tmp_path / "hourly.nc")
    with pytest.raises(DataError, match=r"tp is summed over 1 h, in .* over 6 h; sum the truth over 6 h first"):
        score(str(tmp_path / "f.nc"), tmp_path / "hourly.nc")
    score(str(tmp_path / "f.nc"), tmp_path / "hourly.nc", variables=["z500"])
    forecast = forecast_of(truth, [0, 3], 2).rename(t2m="tp")
    forecast.tp.attrs["cell_methods"] = "time: sum (interval: 1 hour)"
    forecast.to_netcdf(tmp_path / "f.nc")
    score(str(tmp_path / "f.nc"), tmp_path / "hourly.nc")
    months = np.arange("2020-01", "2024-01", dtype="datetime64[M]").astype("datetime64[ns]")
    hourly.assign_coords(time=months).to_netcdf(tmp_path / "monthly.nc")
    with pytest.raises(DataError, match=r"has one time a month, .* has shorter steps"):
        score(str(tmp_path / "f.nc"), tmp_path / "monthly.nc")


def test_a_climatology_that_saw_the_truth_or_lacks_its_season_is_named(tmp_path):
    truth = truth_file(tmp_path)
    forecast_of(truth, [30, 33], 2).to_netcdf(tmp_path / "f.nc")
    notes = score(str(tmp_path / "f.nc"), truth, ("2020-01-01", "2020-01-12")).attrs["notes"]
    assert "the climatology was made of times that are scored here" in notes
    assert "climatology" not in score(str(tmp_path / "f.nc"), truth, ("2020-01-01", "2020-01-07")).attrs["notes"]
    field = np.zeros((1, *GRID.shape), "f4")
    january = {name: (("month", "lat", "lon"), field, {"units": units}) for name, units in UNITS.items()}
    xr.Dataset(january, {"month": [2], **axes()}).to_netcdf(tmp_path / "c.nc")
    result = score(str(tmp_path / "f.nc"), truth, tmp_path / "c.nc")
    assert f"no ACC: {tmp_path / 'c.nc'} has none for 2020-01-08" in result.attrs["notes"]
    assert "climatology" not in result.forecast.values


def test_a_climatology_that_the_disk_cannot_hold_is_refused_before_it_is_made(tmp_path, monkeypatch):
    truth = truth_file(tmp_path)
    forecast_of(truth, [30, 33], 2).to_netcdf(tmp_path / "f.nc")
    usage = SimpleNamespace(free=10**5)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DataError, match=r"its sums need 0.0 GiB in .* 0.0 GiB; name another folder in TMPDIR"):
        score(str(tmp_path / "f.nc"), truth, ("2020-01-01", "2020-01-12"))


def test_files_of_one_forecast_that_do_not_fit_each_other_are_refused(tmp_path):
    truth = truth_file(tmp_path)
    forecast_of(truth, [0], 2, members=3).to_netcdf(tmp_path / "a.nc")
    other = forecast_of(truth, [3], 2, members=3)
    for name, changed, words in (
        ("b", other.isel(member=slice(2)), r"b\.nc: has 2 members, .*a\.nc has 3"),
        ("c", other.isel(lat=slice(None, None, 2)), r"c\.nc: is on grid"),
        ("d", other.drop_vars("t2m"), r"d\.nc: has no forecast of t2m; it holds z500"),
        ("e", change(other, "units"), r"e\.nc: t2m is in 'degC', in .*a\.nc in 'K'"),
    ):
        changed.to_netcdf(tmp_path / f"{name}.nc")
        with pytest.raises(DataError, match=words):
            score(str(tmp_path / f"[a{name}].nc"), truth)


def test_a_forecast_named_twice_is_refused(tmp_path):
    truth = truth_file(tmp_path)
    for name in "ab":
        forecast_of(truth, [0, 3], 2).to_netcdf(tmp_path / f"{name}.nc")
    with pytest.raises(DataError, match=r"b\.nc: the forecast from 2020-01-01T00:00 for 2020-01-01T00:00 is also in"):
        Forecasts(str(tmp_path / "[ab].nc"))


def test_a_models_own_calendar(tmp_path):
    """29 February 2020 is no day of noleap: 6 hours after the 28th comes March, in forecast and truth alike."""
    times = xr.date_range("2020-02-28", periods=12, freq="6h", calendar="noleap", use_cftime=True)
    values = 280.0 + np.random.default_rng(0).standard_normal((12, *GRID.shape))
    fields = {"t2m": (("time", "lat", "lon"), values.astype("f4"), {"units": "K"})}
    data = xr.Dataset(fields, {"time": times, **axes()})
    data.to_netcdf(tmp_path / "truth.nc")
    forecast = (data.isel(time=slice(1, 7)) + 1.0).assign_coords(init_time=times[0])
    forecast.t2m.attrs["units"] = "K"
    leads = np.arange(1, 7) * np.timedelta64(6, "h").astype("timedelta64[ns]")
    for name, coordinate in (("valid", {}), ("lead", {"lead_time": ("time", leads)})):
        one = forecast.assign_coords(coordinate)
        one = one.rename(time="step_of_file").drop_vars("step_of_file") if coordinate else one
        one.to_netcdf(tmp_path / f"{name}.nc")
        result = score(str(tmp_path / f"{name}.nc"), tmp_path / "truth.nc", ("2020-02-28", "2020-03-02"))
        assert result.lead_time.values.tolist() == [6, 12, 18, 24, 30, 36]
        np.testing.assert_allclose(result.bias.sel(forecast="forecast"), 1.0, atol=1e-5)
        persistence = result.rmse.sel(forecast="persistence", region="globe")[0, -1]
        weights = region_weights(GRID)[0][:, None]
        error = ((values[6] - values[0]) ** 2 * weights).sum() / weights.sum() / GRID.nlon
        assert float(persistence) == pytest.approx(np.sqrt(error), rel=1e-5)
    with pytest.raises(DataError, match="counts in the proleptic_gregorian calendar, the forecasts in noleap"):
        score(str(tmp_path / "valid.nc"), truth_file(tmp_path), variables=["t2m"])
