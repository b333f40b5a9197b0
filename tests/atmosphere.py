"""An analytic atmosphere, known at every time and place, and files of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

from sfno_dist import Grid

OFFSETS = {"a": 0.0, "b": 0.0, "2t": 5.0, "t": 0.0, "t2m": 5.0, "sst": 9.0, "z": 50000.0, "u": -250.0}
START = np.datetime64("2019-12-30", "ns")
GRID = Grid("equiangular", 13, 24)


def atmosphere(name: str, times: np.ndarray, lat: np.ndarray, lon: np.ndarray) -> np.ndarray:
    """270 + s + 0.01 hours + 20 sin(lat) + 3 cos(lat) cos(lon + 0.02 hours)   [time, lat, lon]"""
    hours = ((times - START) / np.timedelta64(1, "h"))[:, None, None]
    phi, lam = np.radians(lat)[None, :, None], np.radians(lon)[None, None, :]
    return 270 + OFFSETS[name] + 0.01 * hours + 20 * np.sin(phi) + 3 * np.cos(phi) * np.cos(lam + 0.02 * hours)


def make(name: str = "t", steps: int = 6, first: int = 0, grid: Grid = GRID, **attributes) -> xr.Dataset:
    """The atmosphere in canonical form, 6-hourly."""
    times = START + np.arange(first, first + steps) * np.timedelta64(6, "h")
    values = atmosphere(name, times, grid.latitudes_degrees, grid.longitudes_degrees).astype(np.float32)
    coordinates = {
        "time": times,
        "latitude": ("latitude", grid.latitudes_degrees, {"units": "degrees_north"}),
        "longitude": ("longitude", grid.longitudes_degrees, {"units": "degrees_east"}),
    }
    return xr.Dataset({name: (("time", "latitude", "longitude"), values, {"units": "K", **attributes})}, coordinates)


WRITERS = {
    "netcdf4": lambda data, path: data.to_netcdf(path.with_suffix(".nc"), engine="netcdf4"),
    "netcdf3": lambda data, path: data.to_netcdf(path.with_suffix(".nc"), engine="scipy"),
    "zarr2": lambda data, path: data.to_zarr(path.with_suffix(".zarr"), zarr_format=2, consolidated=True),
    "zarr3": lambda data, path: data.to_zarr(path.with_suffix(".zarr"), zarr_format=3, consolidated=False),
}


def write(data: xr.Dataset, folder: Path, name: str = "a", kind: str = "netcdf4") -> Path:
    WRITERS[kind](data, folder / name)
    return (folder / name).with_suffix(".zarr" if "zarr" in kind else ".nc")


def assert_right(data: xr.Dataset, name: str = "t", atol: float = 1e-4) -> None:
    variable = next(iter(data.data_vars))
    assert data[variable].dims == ("time", "lat", "lon") and data[variable].dtype == np.float32
    assert np.all(np.diff(data.lat) < 0) and np.all(np.diff(data.lon) > 0) and 0 <= data.lon[0] < data.lon[-1] < 360
    assert np.all(np.diff(data.time.values) > np.timedelta64(0))
    expected = atmosphere(name, data.time.values, data.lat.values, data.lon.values)
    np.testing.assert_allclose(data[variable].values, expected, atol=atol)
