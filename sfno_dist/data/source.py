"""One opened file: which of its dims are time, lat and lon, and how its points go into canonical order.

Canonical: (time, lat, lon), lat from north to south, lon eastward from the first meridian at or after 0.
"""

from __future__ import annotations

import os
import warnings

import numpy as np
import xarray as xr

from sfno_dist.data.checks import check_file, check_values
from sfno_dist.data.errors import DataError
from sfno_dist.data.names import find_coordinate, find_variable
from sfno_dist.geometry import Grid, GridError


class SourceFile:
    """A file that ``DataError`` refuses when it is unreadable or its points are no global grid.

    ``grid`` of its points; ``times`` [n] datetime64[ns], in the file's order, empty for a field without time.
    """

    def __init__(self, path: str) -> None:
        check_file(path)
        self.path = path
        self.dataset = _open(path)
        lat, lon = (self._dim(which) for which in ("lat", "lon"))
        self.dims = {"lat": lat, "lon": lon, "time": find_coordinate(self.dataset, "time")}
        latitudes, longitudes = (self.dataset[x].values.astype(np.float64) for x in (lat, lon))
        self._columns_kept = longitudes.size
        if longitudes.size > 2 and np.isclose(abs(longitudes[-1] - longitudes[0]), 360.0):
            self._columns_kept -= 1  # the first meridian once more at the end
            longitudes = longitudes[:-1]
        try:
            self.grid = Grid.from_coordinates(latitudes, longitudes)
        except GridError as error:
            raise DataError(f"{path}: {error}") from error
        # rows[r] and columns[j]: where canonical row r and column j lie in the file.
        self.rows = np.argsort(-latitudes)
        spacing = 360.0 / self.grid.nlon
        self.columns = np.argsort(
            np.round((longitudes - self.grid.first_longitude) / spacing).astype(int) % self.grid.nlon
        )
        self.latitudes = latitudes[self.rows]
        self.times = self._times()
        self._found: dict[str, tuple[str, int | None]] = {}

    def _dim(self, which: str) -> str:
        name = find_coordinate(self.dataset, which)
        if name is None:
            units = {"lat": "degrees_north", "lon": "degrees_east"}[which]
            raise DataError(
                f"{self.path}: no {which} coordinate (one dimension, units {units} or a common name); "
                f"the file has {', '.join(map(str, self.dataset.coords)) or 'no coordinates'}"
            )
        return name

    def _times(self) -> np.ndarray:
        name = self.dims["time"]
        if name is None:
            return np.empty(0, "datetime64[ns]")
        times = self.dataset[name]
        if np.issubdtype(times.dtype, np.datetime64):
            return times.values.astype("datetime64[ns]")
        if times.dtype == object:
            raise DataError(
                f"{self.path}: {name} counts in the {times.values[0].calendar} calendar; convert it to gregorian"
            )
        units = times.attrs.get("units", "none")
        raise DataError(
            f"{self.path}: {name} with units {units!r} is no time that can be decoded; use 'hours since ...'"
        )

    def variable(self, wanted: str) -> tuple[xr.DataArray, dict]:
        """The lazy field of a wanted variable, dims of length 1 dropped, and its attributes."""
        if wanted not in self._found:
            self._found[wanted] = find_variable(self.dataset, wanted, self.path)
        name, level = self._found[wanted]
        field = self.dataset[name]
        if level is not None:
            field = field.isel({find_coordinate(self.dataset, "level"): level})
        spare = [dim for dim in field.dims if dim not in self.dims.values()]
        longer = [f"{dim} ({field.sizes[dim]})" for dim in spare if field.sizes[dim] != 1]
        if longer:
            raise DataError(
                f"{self.path}: {name} has the further dimension {', '.join(longer)}; name one level like {name}500"
            )
        for which in ("lat", "lon"):
            if self.dims[which] not in field.dims:
                raise DataError(
                    f"{self.path}: {name} has dims {', '.join(map(str, field.dims))}, no {self.dims[which]}"
                )
        return field.isel(dict.fromkeys(spare, 0)), dict(field.attrs)

    def fields(self) -> list[str]:
        """Names of all fields on (time, lat, lon), further dims of length 1 aside."""
        return [str(name) for name, field in self.dataset.data_vars.items() if self._is_field(field)]

    def _is_field(self, field: xr.DataArray) -> bool:
        spare = [dim for dim in field.dims if dim not in self.dims.values()]
        return set(self.dims.values()) <= set(field.dims) and all(field.sizes[dim] == 1 for dim in spare)

    def read(self, wanted: str, times: np.ndarray | None, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Checked values at ``times`` of the file and canonical rows and columns   [times, rows, columns] float32"""
        field, _ = self.variable(wanted)
        index = {self.dims["lat"]: self.rows[rows], self.dims["lon"]: self.columns[columns]}
        order = [self.dims["lat"], self.dims["lon"]]
        if times is not None and self.dims["time"] in field.dims:
            index[self.dims["time"]] = times
            order.insert(0, self.dims["time"])
        try:
            values = field.isel(index).transpose(*order).values
        except (OSError, RuntimeError, EOFError) as error:
            raise DataError(
                f"{self.path}: {wanted} cannot be read ({error}); the file is damaged, copy it again"
            ) from error
        moments = self.times[times] if times is not None else np.array(["NaT"], "datetime64[ns]")
        # Checked as stored: a value that is finite there may be infinite in float32.
        with np.errstate(over="ignore"):
            values = values.astype(np.float32, copy=False)
        check_values(values, variable=wanted, times=moments, source=self.path)
        return values


def _open(path: str) -> xr.Dataset:
    """Lazily, by xarray without dask: its arrays hang in forked DataLoader workers."""
    options = {"engine": "zarr", "consolidated": None} if os.path.isdir(path) else {"engine": "netcdf4"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fill values that do not fit the packed type: such files are common
            return xr.open_dataset(path, chunks=None, **options)
    except (OSError, RuntimeError, KeyError) as error:
        raise DataError(
            f"{path}: cannot be read ({str(error).splitlines()[0]}); the file is damaged, copy it again"
        ) from error
    except ValueError as error:
        if "unable to decode time" in str(error):
            units = str(error).split("units ")[-1].split(" with")[0]
            raise DataError(f"{path}: time with units {units} cannot be decoded; use 'hours since ...'") from error
        raise DataError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error
