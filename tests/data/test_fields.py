"""Many variables and times read at once are what each reads as by itself, and each chunk is decoded once."""

from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr

from sfno_dist import Grid
from sfno_dist.data.ledger import LEDGER
from sfno_dist.data.samples import FieldReader
from sfno_dist.mesh import ProcessMesh

GRID = Grid("equiangular", 13, 24)
TIMES = np.datetime64("2020-01-01", "ns") + np.arange(8) * np.timedelta64(6, "h")
NAMES = ["a500", "b", "a850", "a1000"]
VALUES = np.random.default_rng(0).standard_normal((8, 4, *GRID.shape)).astype("f4")  # [time, variable, lat, lon]
COORDINATES = {"time": TIMES, "lat": GRID.latitudes_degrees, "lon": GRID.longitudes_degrees}
ITEM = 4 * GRID.nlat * GRID.nlon


def plain(folder: Path, kind: str, times: int, levels: int) -> list[str]:
    """``a`` on levels [850, 500, 1000] in chunks of ``times`` x ``levels``, and ``b``."""
    levelled = VALUES[:, [2, 0, 3]]
    data = xr.Dataset(
        {"a": (("time", "level", "lat", "lon"), levelled), "b": (("time", "lat", "lon"), VALUES[:, 1])},
        COORDINATES | {"level": ("level", [850.0, 500.0, 1000.0], {"units": "hPa"})},
    )
    chunks = {"a": (times, levels, *GRID.shape), "b": (times, *GRID.shape)}
    if kind == "zarr":
        encoding = {name: {"chunks": x} for name, x in chunks.items()}
        data.to_zarr(folder / "a.zarr", consolidated=False, encoding=encoding)
        return [str(folder / "a.zarr")]
    data.to_netcdf(folder / "a.nc", encoding={name: {"chunksizes": x, "zlib": True} for name, x in chunks.items()})
    return [str(folder / "a.nc")]


def by_file(folder: Path) -> list[str]:
    """Each variable in a file of its own, and each half of the times."""
    data = xr.Dataset({name: (("time", "lat", "lon"), VALUES[:, n]) for n, name in enumerate(NAMES)}, COORDINATES)
    paths = []
    for name in NAMES:
        for half in (slice(4), slice(4, None)):
            paths.append(str(folder / f"{name}_{half.start}.nc"))
            data[[name]].isel(time=half).to_netcdf(paths[-1], encoding={name: {"chunksizes": (1, *GRID.shape)}})
    return paths


def anemoi(folder: Path) -> list[str]:
    points = np.meshgrid(GRID.latitudes_degrees, GRID.longitudes_degrees, indexing="ij")
    flat = {name: ("cell", x.ravel()) for name, x in zip(("latitudes", "longitudes"), points, strict=True)}
    data = ("time", "variable", "ensemble", "cell"), VALUES[:, [0, 3, 1, 2]].reshape(8, 4, 1, -1)
    raw = xr.Dataset({"data": data, "dates": ("time", TIMES), **flat})
    raw.attrs["variables"] = ["a_500", "a_1000", "b", "a_850"]
    raw.to_zarr(folder / "a.zarr", consolidated=False, encoding={"data": {"chunks": (1, 4, 1, GRID.nlat * GRID.nlon)}})
    return [str(folder / "a.zarr")]


def makani(folder: Path) -> list[str]:
    with netCDF4.Dataset(folder / "2020.h5", "w") as file:
        for name, size in zip(("timestamp", "channel", "lat", "lon"), VALUES.shape, strict=True):
            file.createDimension(name, size)
        fields = ("timestamp", "channel", "lat", "lon")
        file.createVariable("fields", "f4", fields, zlib=True, chunksizes=(1, *VALUES.shape[1:]))[:] = VALUES
        seconds = TIMES.astype("datetime64[s]").astype(float)
        for name, axis in (("timestamp", seconds), ("lat", GRID.latitudes_degrees), ("lon", GRID.longitudes_degrees)):
            file.createVariable(name, "f8", (name,))[:] = axis
        file.createVariable("channel", str, ("channel",))[:] = np.array(NAMES, dtype=object)
    return [str(folder / "2020.h5")]


# how the files are made; chunks touched, in fields, by all variables at times 5, 1, 2 and by two of them at time 3
LAYOUTS = {
    "netCDF, a chunk is a field": (lambda folder: plain(folder, "netcdf", 1, 1), 12, 2),
    "netCDF, a chunk is all levels": (lambda folder: plain(folder, "netcdf", 1, 3), 12, 4),
    "netCDF, a chunk is two of three levels": (lambda folder: plain(folder, "netcdf", 1, 2), 12, 3),
    "zarr, a chunk is all levels": (lambda folder: plain(folder, "zarr", 1, 3), 12, 4),
    "zarr, a chunk is four times of all levels": (lambda folder: plain(folder, "zarr", 4, 3), 32, 16),
    "a file for each variable": (by_file, 12, 2),
    "anemoi": (anemoi, 12, 4),
    "makani": (makani, 12, 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_at_once_is_what_each_is_alone(name, tmp_path):
    make, all_chunks, two_chunks = LAYOUTS[name]
    paths = make(tmp_path)
    reader = FieldReader(paths, NAMES)
    LEDGER.clear()
    np.testing.assert_array_equal(reader.read([5, 1, 2]), VALUES[[5, 1, 2]])
    assert (LEDGER.total.touched, LEDGER.total.asked) == (all_chunks * ITEM, 12 * ITEM)
    two = FieldReader(paths, NAMES[:2])
    LEDGER.clear()
    np.testing.assert_array_equal(two.read([3]), VALUES[[3], :2])
    assert (LEDGER.total.touched, LEDGER.total.asked) == (two_chunks * ITEM, 2 * ITEM)
    mesh = ProcessMesh.on_paper(polar=2, azimuth=3, rank=4)
    tile = FieldReader(paths, NAMES, mesh=mesh)
    np.testing.assert_array_equal(tile.read([7, 7, 0]), VALUES[[7, 7, 0], :, tile.tile.rows, tile.tile.columns])
    for number, variable in enumerate(NAMES):
        np.testing.assert_array_equal(reader.dataset[variable], VALUES[:, number])
