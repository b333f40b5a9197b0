"""Which coordinates of a file are latitude, longitude, time, pressure and ensemble member."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import xarray as xr

from sfno_dist.data.errors import DataError
from sfno_dist.data.units import meaning
from sfno_dist.geometry import Grid

HORIZONTAL = {
    "lat": ("latitude", ("lat", "latitude", "y"), "Y", ("degrees_north", "degree_north", "degrees_n", "degree_n")),
    "lon": ("longitude", ("lon", "longitude", "x"), "X", ("degrees_east", "degree_east", "degrees_e", "degree_e")),
}
TIMES = ("time", "valid_time", "datetime", "date", "timestamp")
LEADS = ("step", "lead_time", "leadtime", "prediction_timedelta", "forecast_period")
LEVELS = ("level", "pressure_level", "isobaricinhpa", "plev", "lev", "pressure", "isobaric")
MEMBERS = ("number", "member", "member_id", "ensemble", "ensemble_member", "realization", "realisation", "ens")


def find_horizontal(dataset: xr.Dataset, path: str) -> dict[str, tuple[str, np.ndarray]]:
    """(dim, degrees [n]) of ``lat`` and ``lon``; ``DataError`` where they are no product of one with the other."""
    found = {which: _one_dimensional(dataset, which, certain=True) for which in HORIZONTAL}
    if None in found.values():
        pair = [_two_dimensional(dataset, which) for which in HORIZONTAL]
        if pair[0] is not None and pair[1] is not None:
            return _separated(dataset, pair[0], pair[1], path)
        found = {which: name or _one_dimensional(dataset, which, certain=False) for which, name in found.items()}
    for which, name in found.items():
        if name is None:
            held = ", ".join(str(x) for x in dataset.variables if dataset[x].ndim == 1) or "none"
            raise DataError(
                f"{path}: no {which} coordinate (one dimension, units {HORIZONTAL[which][3][0]} or a common name); "
                f"the one-dimensional variables of the file are {held}"
            )
    lat, lon = (dataset[found[which]] for which in HORIZONTAL)
    if lat.dims == lon.dims:
        raise DataError(
            f"{path}: {lat.name} and {lon.name} lie on one dimension {lat.dims[0]} ({lat.size} points): a reduced or "
            f"unstructured grid; regrid to latitudes x longitudes"
        )
    return {which: (str(x.dims[0]), _degrees(x)) for which, x in (("lat", lat), ("lon", lon))}


def _degrees(axis: xr.DataArray) -> np.ndarray:
    values = axis.values.astype(np.float64)
    return np.degrees(values) if str(axis.attrs.get("units", "")).lower().startswith("radian") else values


def _one_dimensional(dataset: xr.Dataset, which: str, *, certain: bool) -> str | None:
    standard_name, names, axis, units = HORIZONTAL[which]
    candidates = [
        str(name) for name in dataset.variables if dataset[name].ndim == 1 and dataset[name].dtype.kind in "iuf"
    ]
    attributes = {name: dataset[name].attrs for name in candidates}
    own = [
        x for x in candidates if not str(attributes[x].get("standard_name", "")).startswith(("grid_", "projection_"))
    ]
    tests = (
        [x for x in candidates if attributes[x].get("standard_name") == standard_name],
        [x for x in candidates if str(attributes[x].get("units", "")).lower() in units],
        [] if certain else [x for x in own if x.lower() in names],
        [] if certain else [x for x in own if attributes[x].get("axis") == axis],
    )
    for found in tests:
        if found:
            return next((x for x in found if dataset[x].dims == (x,)), found[0])
    return None


def _two_dimensional(dataset: xr.Dataset, which: str) -> str | None:
    standard_name, names, _, units = HORIZONTAL[which]
    for name in dataset.variables:
        x = dataset[name]
        told = x.attrs.get("standard_name") == standard_name or str(x.attrs.get("units", "")).lower() in units
        if x.ndim == 2 and (
            told or str(name).lower() in (*names, f"nav_{which}", f"{which}2d", "xlat"[: 4 if which == "lat" else 0])
        ):
            return str(name)
    return None


def _separated(dataset: xr.Dataset, lat: str, lon: str, path: str) -> dict[str, tuple[str, np.ndarray]]:
    """Of two-dimensional coordinates the one-dimensional ones that they repeat, where they do."""
    a, b = dataset[lat], dataset[lon].transpose(*dataset[lat].dims)
    for row_dim, column_dim in (a.dims, a.dims[::-1]):
        rows, columns = (x.transpose(row_dim, column_dim).values.astype(np.float64) for x in (a, b))
        if np.ptp(rows, axis=1).max() < 1e-4 and np.ptp(columns, axis=0).max() < 1e-4:
            return {"lat": (str(row_dim), rows[:, 0]), "lon": (str(column_dim), columns[0])}
    raise DataError(
        f"{path}: {lat} and {lon} vary along both of {', '.join(map(str, a.dims))}: a curvilinear or rotated grid; "
        f"regrid to latitudes x longitudes"
    )


def find_time(dataset: xr.Dataset) -> str | None:
    """Name of the time coordinate, of one dimension beside those of length 1; the time of validity before a start's."""
    candidates = [str(name) for name in dataset.variables if sum(n > 1 for n in dataset[name].shape) <= 1]

    def counts(name: str) -> bool:
        return " since " in str(dataset[name].attrs.get("units", "")).lower() or dataset[name].dtype.kind == "M"

    tests = (
        lambda name: dataset[name].attrs.get("standard_name") == "time",
        lambda name: counts(name) and name.lower() == "valid_time",
        lambda name: counts(name) and name.lower() in TIMES,
        lambda name: counts(name) and dataset[name].attrs.get("standard_name") != "forecast_reference_time",
        counts,
        lambda name: name.lower() in TIMES and dataset[name].dims == (name,),
        lambda name: dataset[name].attrs.get("axis") == "T",
    )
    for test in tests:
        found = [name for name in candidates if test(name)]
        if found:
            return max(found, key=lambda name: dataset[name].ndim)
    return None


def refuse_start_times(dataset: xr.Dataset, name: str, path: str) -> None:
    """``DataError`` where the time ``name`` is that of the start of forecasts, and their fields are of a later one."""
    if dataset[name].attrs.get("standard_name") == "time" or name.lower() == "valid_time":
        return
    for key, lead in dataset.variables.items():
        told = lead.attrs.get("standard_name") == "forecast_period" or str(key).lower() in LEADS
        if told and lead.size == 1 and lead.dtype.kind in "iuf" and lead.values.ravel()[0] != 0:
            unit = str(lead.attrs.get("units", "")) or "of no unit"
            raise DataError(
                f"{path}: {name} is when forecasts start, and {key} is {lead.values.ravel()[0]:g} {unit}: write the "
                f"time that the fields are for as valid_time, or drop {key} where {name} is that"
            )


def pressures(coordinate: xr.DataArray) -> tuple[float, ...]:
    """hPa of a coordinate of pressure levels, () of one that is something else."""
    if coordinate.dtype.kind not in "iuf" or coordinate.ndim > 1:
        return ()
    unit = str(coordinate.attrs.get("units", ""))
    about = " ".join(str(coordinate.attrs.get(key, "")) for key in ("long_name", "standard_name")).lower()
    counted = coordinate.size > 3 and np.array_equal(coordinate.values, np.arange(1, coordinate.size + 1))
    if (counted and not unit) or re.search(r"model.level|hybrid|sigma", about):  # levels of a model, by number
        return ()
    named = str(coordinate.name).lower().rstrip("0123456789_") in LEVELS
    pressure = coordinate.attrs.get("standard_name") == "air_pressure"
    values = np.atleast_1d(coordinate.values).astype(np.float64)
    if meaning(unit) == meaning("Pa"):
        return tuple((values / 100.0).tolist())
    if meaning(unit) == meaning("hPa"):
        return tuple(values.tolist())
    if unit or not (named or pressure) or values.size == 0:
        return ()
    # Without units: CMIP counts in Pa and ECMWF in hPa, and the surface has 1000 hPa.
    return tuple((values / (100.0 if values.max() > 2000.0 else 1.0)).tolist())


def is_member(dataset: xr.Dataset, dim: str) -> bool:
    told = dim in dataset.variables and dataset[dim].attrs.get("standard_name") == "realization"
    return told or dim.lower() in MEMBERS


@lru_cache(maxsize=16)
def canonical_axes(
    latitudes: bytes, longitudes: bytes
) -> tuple[Grid, np.ndarray, np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """(grid, rows, columns, latitudes north to south, pairs of columns of one meridian) of a file's points."""
    lat, lon = (np.frombuffer(x, np.float64) for x in (latitudes, longitudes))
    kept, seam = _distinct(lon)
    grid = Grid.from_coordinates(lat, lon[kept])
    rows = np.argsort(-lat)
    spacing = 360.0 / grid.nlon
    places = np.round((lon[kept] - grid.first_longitude) / spacing).astype(int) % grid.nlon
    return grid, rows, kept[np.argsort(places)], lat[rows], seam


def _distinct(lon: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Columns without those that come round to a meridian again, and (column, its repetition)."""
    if lon.size < 3 or not np.all(np.isfinite(lon)):
        return np.arange(lon.size), []
    steps = np.abs(np.diff(lon))
    near = 0.1 * float(np.median(steps))
    kept: list[int] = list(range(lon.size))
    seam = []
    # Only columns a whole turn apart: others that come twice make no grid, which Grid says.
    while len(kept) > 2 and abs(lon[kept[-1]] - lon[kept[0]]) > 360.0 - near:
        last = kept.pop()
        turn = np.abs(np.abs(lon[last] - lon[kept]) - 360.0)
        if turn.min() > near:
            kept.append(last)
            break
        seam.append((kept[int(turn.argmin())], last))
    return np.array(kept), seam
