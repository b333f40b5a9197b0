"""Files that are no time series, opened with xarray: forecasts and climatologies. Their grid, variables and levels.

Dims: M members, H rows from north to south, W columns eastward from the first meridian at or after 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xarray as xr

from sfno_dist.data import DataError
from sfno_dist.data.checks import check_file, unreadable
from sfno_dist.data.names import level_of, quantity_of
from sfno_dist.geometry import Grid
from sfno_dist.geometry.grid import SAME_POINT, GridError

NAMES = {
    "lat": ("lat", "latitude"),
    "lon": ("lon", "longitude"),
    "member": ("member", "number", "realization", "ensemble", "sample"),
    "level": ("level", "pressure_level", "isobaricInhPa", "plev"),
    "lead_time": ("lead_time", "prediction_timedelta", "step"),
    "init_time": ("init_time", "forecast_reference_time", "initial_time"),
    "valid_time": ("valid_time", "time"),
}
STANDARD_NAMES = {
    "lat": "latitude",
    "lon": "longitude",
    "member": "realization",
    "level": "air_pressure",
    "lead_time": "forecast_period",
    "init_time": "forecast_reference_time",
}


@dataclass(frozen=True)
class Stored:
    """A variable, or one pressure level of it: its name (``z500``), that of its file, units and hPa (None: none)."""

    name: str
    name_in_file: str
    units: str
    level: float | None = None
    level_index: int | None = None

    @property
    def quantity(self) -> tuple[str, float | None]:
        """What it is, whatever its name: that of ECMWF where it is known, and the level."""
        name = self.name_in_file.removesuffix("_mean")  # WeatherBench 2 ends those of a climatology so
        split = None if self.level is not None else level_of(name)
        base, level = split or (name, self.level)
        return quantity_of(base, {}) or base.lower(), level


class StoredFile:
    """A netCDF or zarr file with global fields. Raises ``DataError`` naming it and what is wrong."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = os.fspath(path)
        check_file(self.path)
        try:
            engine = "zarr" if os.path.isdir(self.path) else "netcdf4"
            self.dataset = xr.open_dataset(self.path, engine=engine, decode_timedelta=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise unreadable(self.path, error) from error

    def find(self, axis: str) -> str | None:
        """Name of the coordinate or dim of one of ``NAMES``, None where the file has none."""
        for name in NAMES[axis]:
            if name in self.dataset.dims or name in self.dataset.coords or name in self.dataset.data_vars:
                return name
        for other, coordinate in self.dataset.coords.items():
            if axis in STANDARD_NAMES and coordinate.attrs.get("standard_name") == STANDARD_NAMES[axis]:
                return str(other)
        return None

    def dim(self, axis: str) -> str | None:
        """``find`` where it is a dimension."""
        name = self.find(axis)
        return name if name in self.dataset.dims else None

    @cached_property
    def grid(self) -> Grid:
        """Of the fields as ``read`` gives them."""
        lat, lon = self.dim("lat"), self.dim("lon")
        if lat is None or lon is None:
            held = ", ".join(map(str, self.dataset.dims)) or "none"
            raise DataError(f"{self.path}: needs the dims lat and lon, has {held}")
        try:
            return Grid.from_coordinates(self.dataset[lat].values, self.dataset[lon].values)
        except GridError as error:
            raise DataError(f"{self.path}: {error}") from error

    @cached_property
    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of the file in canonical order."""
        lat, lon = (self.dataset[self.dim(axis)].values.astype(np.float64) for axis in ("lat", "lon"))
        spacing = 360.0 / lon.size
        turned = np.mod(lon + SAME_POINT * spacing, 360.0)  # 359.9999 is the first meridian, not the last
        return np.argsort(-lat), np.argsort(turned)

    @cached_property
    def variables(self) -> list[Stored]:
        """Every field on latitude and longitude, each pressure level for itself."""
        found: list[Stored] = []
        spatial = {self.dim("lat"), self.dim("lon")}
        for name, array in self.dataset.data_vars.items():
            if not spatial <= set(array.dims) or array.dtype.kind not in "fiu":
                continue
            units, level = str(array.attrs.get("units", "")), self.dim("level")
            if level not in array.dims:
                found.append(Stored(str(name), str(name), units))
                continue
            levels = self.dataset[level].values.astype(np.float64)
            levels = levels / 100.0 if self.dataset[level].attrs.get("units") == "Pa" else levels
            found += [Stored(f"{name}{p:g}", str(name), units, float(p), i) for i, p in enumerate(levels)]
        if not found:
            raise DataError(f"{self.path}: has no variable on latitude and longitude")
        return found

    def read(self, variable: Stored, indices: Mapping[str, int]) -> np.ndarray:
        """The field at ``indices`` of its other dims   [M, H, W] float32; M is 1 without members"""
        array = self.dataset[variable.name_in_file]
        chosen = {dim: index for dim, index in indices.items() if dim in array.dims}
        if variable.level_index is not None:
            chosen[str(self.dim("level"))] = variable.level_index
        array = array.isel(chosen)
        member = self.dim("member")
        wanted = ([member] if member in array.dims else []) + [self.dim("lat"), self.dim("lon")]
        beyond = [str(dim) for dim in array.dims if dim not in wanted and array.sizes[dim] > 1]
        if beyond:
            raise DataError(
                f"{self.path}: {variable.name_in_file} has a dim {beyond[0]} of {array.sizes[beyond[0]]} beside time, "
                f"member, level, latitude and longitude; choose one index of it"
            )
        try:
            values = array.squeeze([d for d in array.dims if d not in wanted], drop=True).transpose(*wanted).values
        except (OSError, RuntimeError, ValueError) as error:
            raise unreadable(self.path, error, variable.name) from error
        rows, columns = self._order
        return np.atleast_3d(values.astype(np.float32).T).T[:, rows][:, :, columns]


def check_same_grid(grid: Grid, other: Grid, path: str, other_path: str) -> None:
    """``DataError`` where two grids differ by more than the rounding of their coordinates."""
    same = grid.shape == other.shape
    if same:
        near = SAME_POINT * np.abs(np.diff(other.latitudes_degrees)).min()
        turn = abs(grid.first_longitude - other.first_longitude) * grid.nlon / 360.0
        same = bool(np.abs(grid.latitudes_degrees - other.latitudes_degrees).max() < near and turn < SAME_POINT)
    if not same:
        raise DataError(f"{path}: is on grid {grid}, {other_path} on {other}; regrid one of them")
