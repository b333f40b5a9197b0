"""What is decoded from a file is what xarray decodes."""

import netCDF4
import numpy as np
import pytest
import xarray as xr

from sfno_dist import Grid
from sfno_dist.data import open_dataset

GRID = Grid("equiangular", 7, 12)
PACKED = {"scale_factor": 0.25, "add_offset": 280.0}
# (type in the file, attributes, codes of missing values among the numbers)
STORED = {
    "plain": ("f4", {}, []),
    "double": ("f8", {"_FillValue": -999.0}, [-999.0]),
    "two codes": ("f4", {"_FillValue": np.float32(1e20), "missing_value": np.float32(-1.0)}, [1e20, -1.0]),
    "packed": ("i2", PACKED | {"_FillValue": np.int16(-32767)}, [-32767]),
    "packed, two codes": ("i2", PACKED | {"_FillValue": np.int16(-9), "missing_value": np.int16(-8)}, [-9, -8]),
    "packed in bytes": ("i1", {"scale_factor": 0.5, "add_offset": 290.0, "_FillValue": np.int8(-1)}, [-1]),
    "bytes without sign": ("i1", PACKED | {"_Unsigned": "true", "_FillValue": np.int8(-1)}, [-1]),
    "offset alone": ("i2", {"add_offset": 273.0}, []),
    "scale in single precision": ("i4", {"scale_factor": np.float32(0.01), "add_offset": np.float32(270.0)}, []),
    "unsigned type": ("u2", PACKED | {"_FillValue": np.uint16(65535)}, [65535]),
    "whole numbers": ("i4", {"_FillValue": -5}, [-5]),
}


@pytest.mark.parametrize("name", STORED)
def test_values_are_those_that_xarray_decodes(name, tmp_path):
    kind, attributes, codes = STORED[name]
    rng = np.random.default_rng(0)
    values = rng.integers(0, 100, (3, *GRID.shape)).astype(kind)
    for place, code in enumerate(codes):
        values[1, place, 3 + place] = code
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        for dim, axis in (("time", np.arange(3.0)), ("lat", GRID.latitudes_degrees), ("lon", GRID.longitudes_degrees)):
            file.createDimension(dim, len(axis))
            file.createVariable(dim, "f8", (dim,))[:] = axis
        file["time"].units, file["lat"].units, file["lon"].units = (
            "hours since 2000-01-01",
            "degrees_north",
            "degrees_east",
        )
        field = file.createVariable("a", kind, ("time", "lat", "lon"), fill_value=attributes.get("_FillValue"))
        field.set_auto_maskandscale(False)
        field.setncatts({key: value for key, value in attributes.items() if key != "_FillValue"})
        field[:] = values
    xr.open_dataset(tmp_path / "a.nc", mask_and_scale=False).to_zarr(tmp_path / "a.zarr", consolidated=False)
    for path in (tmp_path / "a.nc", tmp_path / "a.zarr"):
        expected = xr.open_dataset(path, **({"consolidated": False} if path.suffix == ".zarr" else {}))["a"].values
        assert np.isnan(expected).sum() == len(codes)
        got = open_dataset(path, ["a"], missing=["a"])["a"].values
        np.testing.assert_array_equal(got, expected.astype(np.float32))
