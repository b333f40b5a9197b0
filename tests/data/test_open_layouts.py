"""Layouts of archives, calendars, members and grids: files made here, values known everywhere."""

import json

import cftime
import netCDF4
import numpy as np
import pytest
import xarray as xr
from atmosphere import GRID, START, assert_right, atmosphere, make, write

from sfno_dist import Grid
from sfno_dist.data import DataError, open_dataset
from sfno_dist.data.accumulated import check_accumulations
from sfno_dist.data.calendars import as_gregorian
from sfno_dist.data.open import open_static
from sfno_dist.data.timeline import TimeStep, sequences
from sfno_dist.data.units import same_units


@pytest.mark.parametrize("versions", [[1, 5], [5, 1], ["0001", "0005"], ["0005", "0001"]])
def test_final_data_come_before_preliminary_ones(versions, tmp_path):
    final = make().where(make().time < make().time[4])
    preliminary = make().where(make().time >= make().time[2])
    preliminary.t[2:4] += 0.5
    parts = [final if int(v) == 1 else preliminary for v in versions]
    both = xr.concat(parts, xr.DataArray(np.array(versions), dims="expver", name="expver")).transpose("time", ...)
    assert_right(open_dataset(write(both, tmp_path), ["t"]))
    # In two files of the current layout, expver told for each time.
    first, second = (
        make().isel(time=part).assign_coords(expver=("time", [text] * 4))
        for part, text in ((slice(0, 4), "0001"), (slice(2, 6), "0005"))
    )
    second.t[:2] += 0.5
    paths = [write(second, tmp_path, "a"), write(first, tmp_path, "b")]
    assert_right(open_dataset(paths, ["t"]))


@pytest.mark.parametrize("dim", ["number", "member", "realization", "member_id"])
def test_members_are_chosen_by_their_number(dim, tmp_path):
    stack = xr.concat([make() + 100.0 * n for n in range(3)], xr.DataArray([0, 1, 5], dims=dim, name=dim))
    path = write(stack, tmp_path)
    with pytest.raises(
        DataError, match=rf"t has 3 ensemble members \(along {dim}: 0, 1, 5\); choose one, such as member=0"
    ):
        open_dataset(path, ["t"])
    np.testing.assert_allclose(open_dataset(path, ["t"], member=5).t, make().t + 200.0, rtol=1e-6)
    np.testing.assert_allclose(open_dataset(path, member=1).t, make().t + 100.0, rtol=1e-6)
    with pytest.raises(DataError, match="no member 2; its members are 0, 1, 5"):
        open_dataset(path, ["t"], member=2)
    with pytest.raises(DataError, match="no file has ensemble members"):
        open_dataset(write(make(), tmp_path, "lone"), ["t"], member=0)


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_makani(scales, order, tmp_path):
    lat, lon = GRID.latitudes_degrees[order], GRID.longitudes_degrees
    times = np.datetime64("2020-01-01", "ns") + np.arange(8) * np.timedelta64(6, "h")
    values = np.stack([atmosphere(n, times, lat, lon) for n in ("t2m", "t")], axis=1)
    values[3, 1] = np.nan
    about = {"h5_path": "fields", "dhours": 6, "coords": {"channel": ["t2m", "t850"], "lat": [*lat], "lon": [*lon]}}
    (tmp_path / "data.json").write_text(json.dumps(about))
    names = ("timestamp", "channel", "lat", "lon") if scales else ("a", "b", "c", "d")
    with netCDF4.Dataset(tmp_path / "2020.h5", "w") as file:
        for name, size in zip(names, values.shape, strict=True):
            file.createDimension(name, size)
        file.createVariable("fields", "f4", names, fill_value=False)[:] = values
        valid = file.createVariable("valid_data", "i4", names[:2])
        valid[:] = 1
        valid[3, 1] = 0
        if scales:
            seconds = times.astype("datetime64[s]").astype(float)
            for name, type_, numbers in (("timestamp", "f8", seconds), ("lat", "f8", lat), ("lon", "f8", lon)):
                file.createVariable(name, type_, (name,))[:] = numbers
            file.createVariable("channel", str, ("channel",))[:] = np.array(["t2m", "t850"], dtype=object)
    data = open_dataset(tmp_path / "2020.h5", ["t2m", "t850"])
    assert data.complete.values.tolist() == [n != 3 for n in range(8)]
    expected = atmosphere("t", times, data.lat.values, data.lon.values)
    np.testing.assert_allclose(data.t850[data.complete], expected[data.complete], rtol=1e-6)
    assert np.isnan(data.t850[3]).all()
    assert_right(open_dataset(tmp_path / "2020.h5", ["t2m"]), "t2m")
    assert open_dataset(tmp_path / "2020.h5", ["t2m"]).complete.all()


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("shape_told", [False, True])
@pytest.mark.parametrize("format_", [2, 3])
def test_anemoi(by_column, shape_told, format_, tmp_path):
    lat, lon = GRID.latitudes_degrees[::-1], GRID.longitudes_degrees
    times = START + np.arange(6) * np.timedelta64(6, "h")
    values = np.stack([atmosphere(n, times, lat, lon) for n in ("2t", "t")], axis=1)[:, :, None].astype("f4")
    points = np.meshgrid(lat, lon, indexing="ij")
    if by_column:
        values, points = values.swapaxes(-1, -2), [x.T for x in points]
    values[2] = np.nan
    attributes = {"variables": ["2t", "t_850"], "missing_dates": [str(times[2].astype("datetime64[s]"))]}
    if shape_told:
        attributes["field_shape"] = list(points[0].shape)
    flat = {name: ("cell", x.ravel()) for name, x in zip(("latitudes", "longitudes"), points, strict=True)}
    data = ("time", "variable", "ensemble", "cell"), values.reshape(6, 2, 1, -1)
    raw = xr.Dataset({"data": data, "dates": ("time", times), **flat}, attrs=attributes)
    raw.to_zarr(tmp_path / "a.zarr", zarr_format=format_, consolidated=False)
    opened = open_dataset(tmp_path / "a.zarr", ["t2m", "t850"])
    assert opened.complete.values.tolist() == [True, True, False, True, True, True]
    expected = atmosphere("t", times, opened.lat.values, opened.lon.values)
    keep = opened.complete.values
    np.testing.assert_allclose(opened.t850.values[keep], expected[keep], rtol=1e-6)
    for part in ({"lat": slice(3, 6), "lon": slice(20, 24)}, {"time": 4, "lon": [5, 2]}, {"lat": -1}):
        np.testing.assert_array_equal(opened.t2m.isel(part).values, opened.t2m.load().isel(part).values)


def test_reduced_and_curvilinear_grids_are_named(tmp_path):
    flat = make().stack(values=("latitude", "longitude")).reset_index("values").transpose("time", "values")
    with pytest.raises(DataError, match=r"one dimension values \(312 points\): a reduced or unstructured grid"):
        open_dataset(write(flat, tmp_path, "flat"))
    lat, lon = np.meshgrid(GRID.latitudes_degrees, GRID.longitudes_degrees, indexing="ij")

    def on_two(lat, lon):
        units = ({"units": "degrees_north"}, {"units": "degrees_east"})
        coordinates = {"nav_lat": (("y", "x"), lat, units[0]), "nav_lon": (("y", "x"), lon, units[1])}
        return xr.Dataset({"t": (("time", "y", "x"), make().t.values)}, {"time": make().time, **coordinates})

    assert_right(open_dataset(write(on_two(lat, lon), tmp_path, "regular")))
    with pytest.raises(DataError, match="curvilinear or rotated grid"):
        open_dataset(write(on_two(lat + 0.1 * lon / 360, lon), tmp_path, "curved"))


@pytest.mark.parametrize("columns", [range(-1, 24), range(25), range(24, -1, -1), range(-12, 13), range(-1, 25)])
def test_meridians_that_come_twice_are_read_once_where_they_agree(columns, tmp_path):
    columns = np.array(columns)
    data = make().isel(longitude=columns % 24).assign_coords(longitude=15.0 * columns)
    assert_right(open_dataset(write(data, tmp_path)))
    data.t[:, 4, -1] += 1.0
    with pytest.raises(DataError, match="which have the same longitude"):
        open_dataset(write(data, tmp_path, "b"))


def test_one_file_for_each_time(tmp_path):
    for n in range(6):
        write(make().isel(time=n), tmp_path, f"{9 - n}")
    assert_right(open_dataset(tmp_path / "*.nc"))


@pytest.mark.parametrize("calendar", ["noleap", "360_day", "julian", "all_leap", "365_day"])
def test_calendars_of_models_keep_their_dates_and_steps(calendar, tmp_path):
    data = make(steps=24).assign_coords(
        time=("time", 57.0 * 24 + 6 * np.arange(24), {"units": "hours since 2020-01-01", "calendar": calendar})
    )
    opened = open_dataset(write(data, tmp_path))
    times = opened.time.values
    assert isinstance(times[0], cftime.datetime)
    np.testing.assert_array_equal([(t - times[0]).total_seconds() / 3600 for t in times], 6 * np.arange(24))
    step = TimeStep.of(times)
    assert step == TimeStep(6, "hours") and len(sequences(times, step, 1)) == 23
    gregorian = as_gregorian(times)
    assert np.all(np.diff(gregorian) >= np.timedelta64(0)) or calendar in ("360_day", "all_leap")
    months = gregorian.astype("datetime64[M]").astype(int) % 12 + 1
    np.testing.assert_array_equal(months, [t.month for t in times])
    with pytest.raises(DataError, match=r"counts in the .* calendar"):
        open_dataset([tmp_path / "a.nc", write(make(), tmp_path, "b")], ["t"])


def test_years_beyond_nanoseconds_are_kept(tmp_path):
    time = ("time", np.arange(6.0), {"units": "days since 0850-01-01", "calendar": "proleptic_gregorian"})
    times = open_dataset(write(make().assign_coords(time=time), tmp_path)).time.values
    assert times[0].year == 850 and len(sequences(times, TimeStep.of(times), 1)) == 5


@pytest.mark.parametrize("units", ["seconds since 1900-01-01", "hours since 1900-01-01", "days since 0001-01-01"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_coarse_times_are_rounded_to_the_step(units, dtype, tmp_path):
    dates = [cftime.DatetimeGregorian(2019, 12, 30 + n // 4, n % 4 * 6) for n in range(6)]
    axis = cftime.date2num(dates, units, "standard").astype(dtype)
    data = make().assign_coords(time=("time", axis, {"units": units, "calendar": "standard"}))
    assert_right(open_dataset(write(data, tmp_path)))


def test_an_axis_that_runs_on_is_cut_where_the_store_says(tmp_path):
    data = make().assign_attrs(valid_time_start="2019-12-30", valid_time_stop="2019-12-30")
    with pytest.warns(UserWarning, match="2 of 6 times lie outside"):
        assert open_dataset(write(data, tmp_path)).sizes["time"] == 4


@pytest.mark.parametrize(("a", "b"), [
    ("m s-1", "m/s"), ("m s**-1", "M/S"), ("m s^-1", "meters / second"), ("K", "kelvin"), ("K", "degK"),
    ("hPa", "millibars"), ("kg kg**-1", "1"), ("kg/kg", "(0 - 1)"), ("m**2 s**-2", "m2 s-2"), ("m2/s2", "m^2 s^-2"),
    ("W m-2", "W m**-2"), ("degC", "celsius"), ("J m**-2", "J/m2"),
    ("K", "degrees K"), ("degC", "deg C"), ("degC", "degrees Celsius"),
])  # fmt: skip
def test_spellings_of_one_unit(a, b):
    assert same_units(a, b) and same_units(b, a)


@pytest.mark.parametrize(("a", "b"), [
    ("K", "degC"), ("m", "mm"), ("Pa", "hPa"), ("m", "m**2 s**-2"), ("m s-1", "m s-2"), ("K", ""), ("1", "%"),
    ("m", "m-1"),
])  # fmt: skip
def test_units_that_differ(a, b):
    assert not same_units(a, b) and not same_units(b, a)


def test_spellings_join_and_other_units_do_not(tmp_path):
    a, b = write(make(), tmp_path, "a"), write(make(first=6, units="kelvin"), tmp_path, "b")
    assert_right(open_dataset([a, b]))


@pytest.mark.parametrize(
    ("units", "shift", "odd"), [("K", 0, False), ("degC", -273.15, False), ("C", 0, True), ("K", -273, True)]
)
def test_values_that_do_not_fit_their_units_are_told_once(units, shift, odd, tmp_path, recwarn):
    data = open_dataset(write(make("t2m", units=units) + shift if not units else make("t2m", units=units).assign(
        t2m=lambda d: (d.t2m + shift).assign_attrs(units=units)), tmp_path))  # fmt: skip
    for n in range(3):
        data.t2m[n].values  # noqa: B018
    told = [str(x.message) for x in recwarn if "plausible" in str(x.message)]
    assert len(told) == odd and all("a.nc: t2m has values" in x and repr(units) in x for x in told)


@pytest.mark.parametrize(
    ("attributes", "name", "hours"),
    [
        ({"cell_methods": "time: sum (interval: 1 hour)"}, "rain", 6.0 / 6),
        ({"GRIB_stepType": "accum"}, "rain", 6.0),
        ({}, "tp", 6.0),
        ({}, "total_precipitation_24hr", 24.0),
        ({"units": "kg m-2 s-1"}, "tp", None),
        ({}, "t2m", None),
    ],
)
def test_sums_over_another_interval_than_the_step_are_refused(attributes, name, hours, tmp_path):
    data = make(**{"units": "m", **attributes}).rename(t=name)
    opened = open_dataset(write(data, tmp_path))
    assert opened[name].attrs.get("accumulation_hours") == hours
    check_accumulations(opened, hours or 6.0, "a.nc")
    if hours is not None:
        with pytest.raises(DataError, match=f"{name} is accumulated over {hours:g} h, the step is 12 h"):
            check_accumulations(opened, 12.0, "a.nc")


def test_static_fields(tmp_path):
    path = write(make().isel(time=0, drop=True).isel(latitude=slice(None, None, -1)), tmp_path)
    field = open_static(path, "t")
    expected = atmosphere("t", np.array([START]), field.lat.values, field.lon.values)[0]
    np.testing.assert_allclose(field, expected, rtol=1e-6)
    with pytest.raises(DataError, match="has 6 times"):
        open_static(write(make(), tmp_path, "b"), "t")


def test_two_names_of_one_field_are_refused(tmp_path):
    path = write(make("t2m"), tmp_path)
    with pytest.raises(DataError, match="t2m and 2t are the same variable"):
        open_dataset(path, ["t2m", "2t"])
    both = write(xr.merge([make("t2m"), make("2t")]), tmp_path, "both")
    assert_right(open_dataset(both, ["t2m"]), "t2m")
    with pytest.raises(DataError, match="may be t2m or 2t"):
        open_dataset(both, ["2m_temperature"])


def test_a_scalar_level_has_a_name(tmp_path):
    data = make().assign_coords(plev=xr.DataArray(50000.0, attrs={"units": "Pa", "standard_name": "air_pressure"}))
    assert_right(open_dataset(write(data, tmp_path), ["t500"]))
    hybrid = make().expand_dims(lev=[500.0]).assign_coords(lev=("lev", [500.0], {"units": "1"}))
    with pytest.raises(DataError, match="no variable t500"):
        open_dataset(write(hybrid, tmp_path, "hybrid"), ["t500"])


def test_grids_that_differ_by_rounding_are_one(tmp_path):
    grid = Grid("equiangular", 13, 24)
    rounded = make(first=6).assign_coords(latitude=grid.latitudes_degrees.astype("f4"))
    irregular = [x.isel(latitude=slice(0, -1)) for x in (make(), rounded)]
    paths = [write(x, tmp_path, name) for x, name in zip(irregular, "ab", strict=True)]
    assert_right(open_dataset(paths))


@pytest.mark.parametrize("kind", ["netcdf4", "netcdf3", "zarr2"])
@pytest.mark.parametrize("form", ["{}", "{}Z"])
def test_dates_written_out(kind, form, tmp_path):
    """xarray joins the characters of netCDF-3."""
    texts = [form.format(str(t)[:19]) for t in make().time.values]
    data = make().assign_coords(time=("time", np.array(texts, dtype="S" if kind == "netcdf3" else object)))
    assert_right(open_dataset(write(data, tmp_path, kind=kind)))


@pytest.mark.parametrize("text", ["January", "2019-13-01", "20191230", "", "2019-12-30T06:00+02:00"])
def test_text_that_is_no_date_is_named(text, tmp_path):
    data = make().assign_coords(time=("time", np.array(["2019-12-30"] * 5 + [text], dtype=object)))
    with pytest.raises(DataError, match=r"a\.nc: time holds text such as .*which is no date"):
        open_dataset(write(data, tmp_path))


@pytest.mark.parametrize("units", ["Hours Since 2019-12-30", "hours  since 2019-12-30 00:00:00 UTC"])
def test_units_of_time_in_other_letters(units, tmp_path):
    assert_right(open_dataset(write(make().assign_coords(time=("time", 6 * np.arange(6), {"units": units})), tmp_path)))


@pytest.mark.parametrize("dtype", ["i2", "i4", "i8", "f4", "f8"])
def test_times_never_written_are_named(dtype, tmp_path):
    numbers = 6 * np.arange(6).astype(dtype)
    numbers[2] = netCDF4.default_fillvals[dtype]
    data = make().assign_coords(time=("time", numbers, {"units": "hours since 2019-12-30"}))
    with pytest.raises(DataError, match=r"a\.nc: time: time number 2 is missing"):
        open_dataset(write(data, tmp_path))
    with pytest.raises(DataError, match=r"a\.nc: its time axis time holds no time"):
        open_dataset(write(make().isel(time=slice(0, 0)), tmp_path))


def forecast(hours, *, valid):
    """6-hourly forecasts as cfgrib lays them out: for ``hours`` later than they start."""
    start = ("time", make().time.values - np.timedelta64(hours, "h"), {"standard_name": "forecast_reference_time"})
    data = make().expand_dims("step", 1).assign_coords(time=start, step=("step", [float(hours)], {"units": "hours"}))
    return data.assign_coords(valid_time=(("time", "step"), make().time.values[:, None])) if valid else data


@pytest.mark.parametrize("hours", [0, 6])
def test_fields_of_forecasts_are_at_the_time_they_are_for(hours, tmp_path):
    assert_right(open_dataset(write(forecast(hours, valid=True), tmp_path), ["t"]))
    path = write(forecast(hours, valid=False), tmp_path)
    if hours:
        with pytest.raises(DataError, match=r"a\.nc: time is when forecasts start, and step is 6 hours"):
            open_dataset(path, ["t"])
    else:
        assert_right(open_dataset(path, ["t"]))


def members(numbers, first=0):
    """Member n is the atmosphere 100 K warmer for each number before it."""
    stack = [make(first=first) + 100.0 * n for n in range(len(numbers))]
    return xr.concat(stack, xr.DataArray(numbers, dims="number", name="number")).transpose("time", ...)


def test_files_that_hold_other_members_are_refused(tmp_path):
    both, lone, none = members([0, 1]), make(first=6).assign_coords(number=0), make(first=6)
    a, b, c = (write(data, tmp_path, name) for data, name in ((both, "a"), (lone, "b"), (none, "c")))
    single = write(members([1], first=6), tmp_path, "d")
    assert open_dataset([a, b], ["t"], member=0).sizes["time"] == 12
    assert open_dataset([b, c], ["t"]).sizes["time"] == 6  # of one of the two it is not told
    for paths, member, words in (
        ([a, b], 1, r"b\.nc: t has no member 1; its members are 0"),
        ([a, c], 0, r"c\.nc: tells of no ensemble members of t, .*a\.nc holds member 0"),
        ([b, single], None, r"d\.nc: holds member 1 of t, .*b\.nc holds member 0"),
        ([c, b, single], None, r"d\.nc: holds member 1 of t, .*b\.nc holds member 0"),
        ([write(members([1, 1]), tmp_path, "twice")], 1, r"twice\.nc: t has member 1 more than once"),
    ):
        with pytest.raises(DataError, match=words):
            open_dataset(paths, ["t"], member=member)


def on_levels(values, **attributes):
    levels = xr.DataArray(values, dims="level", name="level", attrs=attributes)
    return xr.concat([make() + 100.0 * n for n in range(len(values))], levels).transpose("time", ...)


@pytest.mark.parametrize(
    ("levels", "attributes"),
    [
        (range(1, 11), {}),
        ([5, 10], {"long_name": "model_level_number"}),
        ([5, 10], {"standard_name": "atmosphere_hybrid_sigma_pressure_coordinate"}),
        ([5, 10], {"units": "m"}),
    ],
)
def test_levels_of_models_are_no_pressures(levels, attributes, tmp_path):
    with pytest.raises(DataError, match="no variable t10;"):
        open_dataset(write(on_levels(levels, **attributes), tmp_path), ["t10"])


def test_a_level_that_comes_twice_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.nc: t has the level 500 hPa 2 times"):
        open_dataset(write(on_levels([500, 500, 850], units="hPa"), tmp_path), ["t500"])


def test_a_field_without_time_is_the_same_at_all_times(tmp_path):
    data = make().assign(orog=make().t[0].drop_vars("time"))
    opened = open_dataset(write(data, tmp_path), ["t", "orog"])
    assert opened.orog.shape == opened.t.shape
    for index in (slice(None), [4, 1], slice(2, 2)):
        expected = np.broadcast_to(data.t[0], (6, 13, 24))[index]
        np.testing.assert_array_equal(open_dataset(tmp_path / "a.nc", ["orog"]).orog[index].values, expected)
    np.testing.assert_array_equal(open_dataset(tmp_path / "a.nc", ["orog"]).orog[3, 2:4, 5].values, data.t[0, 2:4, 5])


def test_points_in_radians(tmp_path):
    axes = {x: (x, np.radians(make()[x].values), {"units": "radians"}) for x in ("latitude", "longitude")}
    assert_right(open_dataset(write(make().assign_coords(axes), tmp_path)))


@pytest.mark.parametrize(
    ("wanted", "held", "level"), [("t500", "ta", True), ("t2m", "tas", False), ("2m_temperature", "tas", False)]
)
def test_names_of_cmip(wanted, held, level, tmp_path):
    data = on_levels([50000.0, 85000.0], units="Pa") if level else make()
    assert_right(open_dataset(write(data.rename(t=held), tmp_path), [wanted]))


MAKANI_FAULTS = {
    "3 latitudes are named, fields has 13": {"lat": [90.0, 0.0, -90.0]},
    "2 channels are named, fields has 1": {"channel": ["t", "u"]},
    "dhours, a number": {"dhours": "6h"},
    r"valid_data has shape \(3, 1\)": {"valid": np.ones((3, 1), "i4")},
    "the channel t is named twice": {"channel": ["t", "t"], "count": 2},
}


@pytest.mark.parametrize("words", MAKANI_FAULTS)
def test_makani_whose_parts_do_not_fit_is_named(words, tmp_path):
    fault = {"channel": ["t"], "lat": [*GRID.latitudes_degrees], "dhours": 6, "count": 1, **MAKANI_FAULTS[words]}
    coords = {"channel": fault["channel"], "lat": fault["lat"], "lon": [*GRID.longitudes_degrees]}
    (tmp_path / "data.json").write_text(json.dumps({"coords": coords, "dhours": fault["dhours"]}))
    parts = {"fields": (("a", "b", "c", "d"), np.repeat(make().t.values[:, None], fault["count"], 1))}
    if "valid" in fault:
        parts["valid_data"] = (("e", "f"), fault["valid"])
    xr.Dataset(parts).to_netcdf(tmp_path / "2019.h5", engine="netcdf4")
    with pytest.raises(DataError, match=rf"2019\.h5: .*{words}"):
        open_dataset(tmp_path / "2019.h5")


@pytest.mark.parametrize("names", [["t", "u"], ["t", "t"], []])
def test_anemoi_whose_names_do_not_fit_are_refused(names, tmp_path):
    points = np.meshgrid(GRID.latitudes_degrees, GRID.longitudes_degrees, indexing="ij")
    flat = {name: ("cell", x.ravel()) for name, x in zip(("latitudes", "longitudes"), points, strict=True)}
    data = ("time", "variable", "ensemble", "cell"), make().t.values.reshape(6, 1, 1, -1)
    raw = xr.Dataset({"data": data, "dates": ("time", make().time.values), **flat}, attrs={"variables": names})
    raw.to_zarr(tmp_path / "a.zarr", consolidated=False)
    with pytest.raises(DataError, match=rf"a\.zarr: its attributes name {len(names)} variables"):
        open_dataset(tmp_path / "a.zarr")


@pytest.mark.parametrize("paths", [None, 3, [None]])
def test_paths_that_are_none_are_named(paths):
    with pytest.raises(DataError, match="data files are named by a path, a pattern or a list of them"):
        open_dataset(paths)
