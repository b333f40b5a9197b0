"""open_dataset against an analytic atmosphere: the right value at every point, whatever the file's habits."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from atmosphere import GRID, WRITERS, assert_right, atmosphere, make, write

from sfno_dist import Grid
from sfno_dist.data import DataError, open_dataset
from sfno_dist.data.timeline import TimeStep, sequences

CASES = Path(__file__).parents[3] / "shared" / "data" / "cases"
HABITS = {
    "as it should be": lambda d: d,
    "south to north": lambda d: d.isel(latitude=slice(None, None, -1)),
    "from -180": lambda d: d.assign_coords(longitude=(d.longitude + 180) % 360 - 180).sortby("longitude"),
    "from 20 past 360": lambda d: d.roll(longitude=-4, roll_coords=True).assign_coords(
        longitude=60.0 + GRID.longitudes_degrees
    ),
    "seam column twice": lambda d: xr.concat([d, d.isel(longitude=[0]).assign_coords(longitude=[360.0])], "longitude"),
    "longitude before latitude": lambda d: d.transpose("time", "longitude", "latitude"),
    "time last": lambda d: d.transpose("latitude", "longitude", "time"),
    "float32 coordinates": lambda d: d.assign_coords(
        latitude=d.latitude.astype("f4"), longitude=(d.longitude + 1e-5).astype("f4")
    ),
    "new CDS names": lambda d: (
        d.rename(time="valid_time")
        .expand_dims(pressure_level=[500.0], axis=1)
        .assign_coords(number=0, expver=("valid_time", ["0001"] * 6))
    ),
    "capital names without attributes": lambda d: xr.Dataset(
        {"T": (("TIME", "LAT", "LON"), d.t.values, {"units": "K"})},
        {"TIME": d.time.values, "LAT": d.latitude.values, "LON": d.longitude.values},
    ),
    "times out of order": lambda d: d.isel(time=[3, 0, 5, 1, 4, 2]),
    "times twice": lambda d: xr.concat([d, d.isel(time=[2, 4])], "time"),
}


@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_files(habit, tmp_path):
    data = open_dataset(write(HABITS[habit](make()), tmp_path), ["t"])
    assert data.sizes == {"time": 6, "lat": 13, "lon": 24} and data.attrs["grid"] == "equiangular"
    assert data.t.attrs["units"] == "K"
    assert_right(data)


@pytest.mark.parametrize("kind", WRITERS)
def test_formats(kind, tmp_path):
    assert_right(open_dataset(write(make(), tmp_path, kind=kind)))


@pytest.mark.parametrize("kind", ["equiangular", "equiangular-offset", "legendre-gauss", "lobatto"])
def test_grids_are_recognised(kind, tmp_path):
    data = open_dataset(write(make(grid=Grid(kind, 16, 30)), tmp_path))
    assert data.attrs["grid"] == kind and Grid.from_coordinates(data.lat, data.lon) == Grid(kind, 16, 30)
    assert_right(data)


def test_columns_that_start_between_the_meridians(tmp_path):
    data = open_dataset(write(make(grid=Grid("equiangular-offset", 12, 24, 7.5)), tmp_path))
    assert data.lon[0] == 7.5
    assert_right(data)


def test_latitudes_of_no_rule_open_as_irregular(tmp_path):
    data = open_dataset(write(make().isel(latitude=slice(0, -1)), tmp_path))
    assert data.attrs["grid"] == "irregular" and data.sizes["lat"] == 12
    assert_right(data)


@pytest.mark.parametrize("kind", ["netcdf4", "netcdf3"])
def test_packing_that_differs_between_files_is_undone(kind, tmp_path):
    for name, first, scale in (("a", 0, 0.002), ("b", 6, 0.001)):
        data = make(first=first)
        data.t.encoding = {"dtype": "int16", "scale_factor": scale, "add_offset": 270.0, "_FillValue": -32767}
        write(data, tmp_path, name, kind)
    data = open_dataset(str(tmp_path / "*.nc"))
    assert_right(data, atol=0.0012)
    data.to_netcdf(tmp_path / "c.nc4")
    with xr.open_dataset(tmp_path / "c.nc4") as written:  # nothing of the first file's packing is inherited
        np.testing.assert_array_equal(written.t.values, data.t.values)


def test_files_in_any_order_with_overlap(tmp_path):
    write(make(first=4), tmp_path, "a_later")
    write(make(first=0).isel(latitude=slice(None, None, -1)), tmp_path, "b_earlier")
    for paths in (tmp_path / "*.nc", [tmp_path / "b_earlier.nc", tmp_path / "a_later.nc"]):
        data = open_dataset(paths)
        assert data.sizes["time"] == 10
        assert_right(data)


def test_parts_read_lazily_equal_the_same_parts_of_the_whole(tmp_path):
    write(make(first=0), tmp_path, "a")
    write(make(first=6).transpose("longitude", "latitude", "time"), tmp_path, "b")
    data = open_dataset(tmp_path / "*.nc")
    assert not data.t._in_memory
    whole = data.t.values
    for part in (
        {"time": 7},
        {"time": slice(3, 9, 2), "lat": slice(2, 5)},
        {"lat": 0, "lon": [3, 20, 1]},
        {"time": [8, 1], "lon": -1},
        {"lat": slice(None, None, -1)},
        {"time": []},
    ):
        expected = xr.DataArray(whole, dims=("time", "lat", "lon")).isel(part).values
        np.testing.assert_array_equal(open_dataset(tmp_path / "*.nc").t.isel(part).values, expected)


def test_levels_are_picked_by_value_whatever_their_unit_and_order(tmp_path):
    levels = [1000.0, 500.0, 850.0]
    stack = xr.concat([make() + 100.0 * n for n in range(3)], xr.DataArray(levels, dims="plev", name="plev"))
    stack.plev.attrs["units"] = "hPa"
    path = write(stack, tmp_path)
    for n, level in enumerate((1000, 500, 850)):
        np.testing.assert_allclose(open_dataset(path, [f"t{level}"])[f"t{level}"], make().t + 100.0 * n, rtol=1e-6)
    pascal = stack.assign_coords(plev=("plev", np.array(levels) * 100.0, {"units": "Pa"}))
    data = open_dataset(write(pascal, tmp_path, "pascal"), ["t850", "t_500"])
    np.testing.assert_allclose(data.t850, make().t + 200.0, rtol=1e-6)
    np.testing.assert_allclose(data.t_500, make().t + 100.0, rtol=1e-6)
    with pytest.raises(DataError, match=r"t at 700 hPa; the file has 1000, 500, 850 hPa"):
        open_dataset(path, ["t700"])
    with pytest.raises(DataError, match=r"further dimension plev \(3\)"):
        open_dataset(path, ["t"])


@pytest.mark.parametrize(
    ("in_file", "attributes", "wanted"),
    [
        ("2m_temperature", {}, "t2m"), ("t2m", {}, "2m_temperature"), ("T2M", {}, "t2m"), ("tas", {}, "tas"),
        ("temp", {"standard_name": "air_temperature"}, "t"), ("10u", {}, "u10"),
    ],
)  # fmt: skip
def test_variables_are_found_under_their_other_names(in_file, attributes, wanted, tmp_path):
    data = open_dataset(write(make(**attributes).rename(t=in_file), tmp_path), [wanted])
    assert list(data) == [wanted]
    assert_right(data)


def test_a_name_never_finds_another_quantity(tmp_path):
    """t2m has CF's name of t, and comes first; u at 10 hPa is not the wind at 10 m."""
    levels = xr.DataArray([500.0, 10.0], dims="level", name="level", attrs={"units": "hPa"})
    t2m, stack = make("t2m", standard_name="air_temperature"), xr.concat([make(), make() + 50.0], levels)
    both = xr.merge([t2m, stack.rename(t="temperature"), stack.rename(t="u")])
    path = write(both, tmp_path)
    np.testing.assert_allclose(open_dataset(path, ["t500"]).t500, make().t, rtol=1e-6)
    np.testing.assert_allclose(open_dataset(path, ["t10"]).t10, make().t + 50.0, rtol=1e-6)
    with pytest.raises(DataError, match="further dimension level"):
        open_dataset(path, ["t"])
    with pytest.raises(DataError, match="no variable u10;"):
        open_dataset(path, ["u10"])
    surface = write(make("2t", standard_name="air_temperature"), tmp_path, "surface")
    with pytest.raises(DataError, match="no variable t500"):
        open_dataset(surface, ["t500"])
    twice = write(xr.merge([make("a", standard_name="x_wind"), make("b", standard_name="x_wind")]), tmp_path, "twice")
    with pytest.raises(DataError, match="x_wind may be a or b"):
        open_dataset(twice, ["x_wind"])


def test_one_file_per_variable(tmp_path):
    write(make("t"), tmp_path, "a")
    write(make("z"), tmp_path, "b")
    for data in (open_dataset(tmp_path / "*.nc"), open_dataset(tmp_path / "*.nc", ["z", "t"])):
        for name in ("t", "z"):
            expected = atmosphere(name, data.time.values, data.lat.values, data.lon.values)
            np.testing.assert_allclose(data[name].values, expected, rtol=1e-6)
    write(make("u", steps=5), tmp_path, "c")
    with pytest.raises(DataError, match=r"c\.nc: u has no time 2019-12-31T06:00:00, which t has \(1 such times\)"):
        open_dataset(tmp_path / "*.nc")


def test_one_name_may_come_as_a_string(tmp_path):
    assert list(open_dataset(write(make("t2m"), tmp_path), "t2m")) == ["t2m"]


REFUSED = {
    "regional": (lambda d: d.isel(longitude=slice(0, 6)), "not global: longitudes must be equally spaced"),
    "hemisphere": (lambda d: d.isel(latitude=slice(0, 7)), "not global"),
    "no latitude": (lambda d: d.drop_vars("latitude"), "no lat coordinate"),
    "no time": (lambda d: d.isel(time=0, drop=True), "no time coordinate"),
    "undecodable time": (
        lambda d: d.assign_coords(time=("time", np.arange(6.0), {"units": "months since 1990-01-01"})),
        "months since 1990-01-01",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_files_that_cannot_be_put_in_canonical_form_are_named(kind, tmp_path):
    change, words = REFUSED[kind]
    with pytest.raises(DataError, match=f"a.nc: .*{words}"):
        open_dataset(write(change(make()), tmp_path), ["t"])


@pytest.mark.parametrize(
    ("value", "words"), [(np.nan, "NaN"), (np.inf, "infinite"), (-np.inf, "infinite"), (9.96921e36, "never written")]
)
def test_bad_values_never_leave_the_reader(value, words, tmp_path):
    data = make()
    data.t[4, 3, 7] = value
    data.t[4, 3, 8] = value
    opened = open_dataset(write(data, tmp_path))
    assert np.isfinite(opened.t[:4].values).all()
    with pytest.raises(DataError, match=rf"a\.nc: t has 2 of 312 values {words}.* at time 2019-12-31T00:00:00"):
        opened.t[4].load()


def test_values_beyond_float32_are_infinite(tmp_path):
    data = make().astype("f8")
    data.t[0, 0, 0] = 1e300
    with pytest.raises(DataError, match="infinite"):
        open_dataset(write(data, tmp_path)).load()


def test_conflicting_values_of_one_time_are_refused(tmp_path):
    write(make(), tmp_path, "a")
    other = make(first=5)
    other.t[:] += 1.0
    write(other, tmp_path, "b")
    with pytest.raises(
        DataError, match=r"b\.nc: values conflict with .*a\.nc: t at time 2019-12-31T06:00:00 differs by 1"
    ):
        open_dataset([tmp_path / "a.nc", tmp_path / "b.nc"])


def test_units_and_grids_that_differ_between_files_are_refused(tmp_path):
    a = write(make(), tmp_path, "a")
    celsius = write(make(first=6, units="degC"), tmp_path, "celsius")
    with pytest.raises(DataError, match=r"celsius\.nc: t has units 'degC', .*a\.nc has 'K'"):
        open_dataset([a, celsius])
    finer = write(make(first=6, grid=Grid("equiangular", 13, 48)), tmp_path, "finer")
    with pytest.raises(DataError, match=r"finer\.nc: is on grid equiangular 13 x 48"):
        open_dataset([a, finer])


@pytest.mark.parametrize("kind", ["netcdf4", "netcdf3"])
@pytest.mark.parametrize("share", [0.05, 0.6, 0.99])
def test_files_cut_off_while_copied_are_named(kind, share, tmp_path):
    data = make(steps=40)
    data.t.encoding = {"dtype": "int16", "scale_factor": 0.002, "add_offset": 270.0, "_FillValue": -32767}
    path = write(data, tmp_path, kind=kind)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DataError, match=r"a\.nc"):
        open_dataset(path).load()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<!DOCTYPE html><html>log in", "starts with '<!DOCTYPE html>"),
        (b"PK\x03\x04 and more", "ZIP archive, and a damaged one"),
        (b"GRIB\0\0\0\2", "a GRIB file; convert it"),
        (b"\x1f\x8b\x08", "gzip-compressed; unpack it"),
        (b"CDF\x01\0\0", "header is cut off"),
        (b"", "it is empty"),
    ],
)
def test_other_files_are_named_for_what_they_are(content, words, tmp_path):
    (tmp_path / "a.nc").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.nc: .*{words}"):
        open_dataset(tmp_path / "a.nc")


def test_paths_and_variables_that_are_not_there_are_named(tmp_path):
    path = write(make("t2m"), tmp_path)
    for absent in (tmp_path / "b.nc", tmp_path / "*.grib", str(tmp_path / "c.zarr")):
        with pytest.raises(DataError, match="no such file"):
            open_dataset(absent)
    with pytest.raises(DataError, match=r"no variable q700; the file holds t2m"):
        open_dataset(path, ["q700"])
    with pytest.raises(DataError, match=r"no variable t3m \(did you mean t2m\?\)"):
        open_dataset(path, ["t3m"])
    with pytest.raises(DataError, match="named twice"):
        open_dataset(path, ["t2m", "t2m"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no zarr group"):
        open_dataset(tmp_path / "empty")


@pytest.mark.skipif(not CASES.is_dir(), reason="shared/data/cases is not beside this checkout")
@pytest.mark.parametrize("case", sorted(json.loads((CASES / "cases.json").read_text())) if CASES.is_dir() else [])
def test_cases(case):
    about = json.loads((CASES / "cases.json").read_text())[case]
    right, paths = about["right"], [CASES / case / file for file in about["files"]]
    if not right["opens"]:
        with pytest.raises(DataError) as error:
            open_dataset(paths, right["variables"]).load()
        for words in right["error_mentions"]:
            assert words.lower() in str(error.value).lower()
        return
    data = open_dataset(paths, right["variables"])
    assert [data.sizes[dim] for dim in ("time", "lat", "lon")] == [right["ntime"], right["nlat"], right["nlon"]]
    assert data.attrs["grid"] == right["grid"]
    step = TimeStep.of(data.time.values)
    assert step == TimeStep(right["step_hours"], "hours")
    if "samples_one_step" in right:
        assert len(sequences(data.time.values, step, 1)) == right["samples_one_step"]
    assert_right(data, right["variables"][0], atol=2e-3)


def test_readers_open_their_own_handles_in_each_process(tmp_path):
    from sfno_dist.data.samples import FieldReader

    reader = FieldReader(str(write(make(), tmp_path)), ["t"])
    first = reader(0)
    copy = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(copy(0), first)
