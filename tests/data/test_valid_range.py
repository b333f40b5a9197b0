"""Values outside the range that a file calls valid are missing, as netCDF4 takes them."""

import netCDF4
import numpy as np
import pytest
import xarray as xr
from atmosphere import make, write

from sfno_dist.data import DataError, open_dataset

PACKED = {"scale_factor": 0.01, "add_offset": 270.0}
# (type in the file, further attributes, one number outside, two at the ends of the range)
RANGES = {
    "range": ("f4", {"valid_range": np.array([100, 400], "f4")}, [-999.0], [100.0, 400.0]),
    "double limits": ("f4", {"valid_range": np.array([100.1, 400.1])}, [100.0, 401.0], [100.1, 400.1]),
    "least": ("f4", {"valid_min": np.float32(100.0)}, [99.0], [100.0, 1e6]),
    "most": ("f8", {"valid_max": 400.0}, [401.0], [-1e6, 400.0]),
    "packed": ("i2", PACKED | {"valid_range": np.array([-3000, 3000], "i2")}, [-3001, 3001], [-3000, 3000]),
    "backwards": ("i2", PACKED | {"scale_factor": -0.01, "valid_max": np.int16(3000)}, [3001], [-3200, 3000]),
    "in units": ("i2", PACKED | {"valid_range": np.array([240.0, 300.0])}, [-3001, 3001], [-3000, 3000]),
    "unsigned": ("i1", {"scale_factor": 0.5, "_Unsigned": "true", "valid_max": np.int8(-6)}, [-5, -1], [0, -6]),
}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("kind", ["nc", "zarr"])
def test_values_outside_the_valid_range_are_missing(name, kind, tmp_path):
    stored, attributes, outside, inside = RANGES[name]
    values = np.full((6, 13, 24), 10 if stored[0] == "i" else 280, stored)
    values[2, 3, : len(outside)], values[2, 4, :2] = outside, inside
    data = make().assign(t=(("time", "latitude", "longitude"), values, {"units": "K", **attributes}))
    path = write(data, tmp_path, kind={"nc": "netcdf4", "zarr": "zarr2"}[kind])
    with pytest.raises(DataError, match=rf"t has {len(outside)} of .* NaN at time 2019-12-30T12.*outside valid_range"):
        open_dataset(path, ["t"]).load()
    got = open_dataset(path, ["t"], missing=["t"]).t.values
    assert np.isnan(got[2, 3, : len(outside)]).all() and np.isnan(got).sum() == len(outside)
    if kind == "nc" and name not in ("double limits", "in units", "unsigned"):  # which netCDF4 reads in its own way
        with netCDF4.Dataset(path) as file:
            np.testing.assert_array_equal(np.isnan(got), np.ma.getmaskarray(file["t"][:]))


@pytest.mark.parametrize("limits", [(0.0, 0.0), (400.0, 100.0), (np.nan, np.nan), "0 to 1"])
def test_ranges_that_hold_nothing_are_none(limits, tmp_path):
    attributes = {"valid_range": limits if isinstance(limits, str) else np.array(limits, "f4")}
    data = make(**attributes)
    xr.testing.assert_allclose(open_dataset(write(data, tmp_path)).t.drop_vars("complete").rename(
        lat="latitude", lon="longitude"), data.t)  # fmt: skip
