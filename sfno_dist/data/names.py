"""What variables and coordinates are called in files of different origin."""

from __future__ import annotations

import difflib
import re

import numpy as np
import xarray as xr

from sfno_dist.data.errors import DataError, VariableMissingError

#: names of one quantity: ECMWF short names, names in ARCO-ERA5 / WeatherBench2, CF standard names
SYNONYMS = [
    {"t", "temperature", "air_temperature"},
    {"z", "geopotential"},
    {"u", "u_component_of_wind", "eastward_wind"},
    {"v", "v_component_of_wind", "northward_wind"},
    {"w", "vertical_velocity", "lagrangian_tendency_of_air_pressure"},
    {"q", "specific_humidity"},
    {"r", "relative_humidity"},
    {"t2m", "2t", "2m_temperature"},
    {"d2m", "2d", "2m_dewpoint_temperature"},
    {"u10", "10u", "10m_u_component_of_wind"},
    {"v10", "10v", "10m_v_component_of_wind"},
    {"u100", "100u", "100m_u_component_of_wind"},
    {"v100", "100v", "100m_v_component_of_wind"},
    {"msl", "mean_sea_level_pressure", "air_pressure_at_mean_sea_level"},
    {"sp", "surface_pressure", "surface_air_pressure"},
    {"sst", "sea_surface_temperature"},
    {"tp", "total_precipitation"},
    {"tcwv", "total_column_water_vapour"},
]
COORDINATES = {
    "time": {"names": ("time", "valid_time", "datetime", "date"), "standard_name": "time", "axis": "T", "units": ()},
    "lat": {
        "names": ("lat", "latitude", "y"),
        "standard_name": "latitude",
        "axis": "Y",
        "units": ("degrees_north", "degree_north", "degrees_n", "degree_n"),
    },
    "lon": {
        "names": ("lon", "longitude", "x"),
        "standard_name": "longitude",
        "axis": "X",
        "units": ("degrees_east", "degree_east", "degrees_e", "degree_e"),
    },
    "level": {
        "names": ("level", "pressure_level", "isobaricinhpa", "plev", "lev"),
        "standard_name": "air_pressure",
        "axis": "Z",
        "units": ("hpa", "millibars", "mbar", "mb", "pa"),
    },
}


def find_coordinate(dataset: xr.Dataset, which: str) -> str | None:
    """Name of the one-dimensional coordinate that is time, lat, lon or level, by CF attributes, then by name."""
    rule = COORDINATES[which]
    candidates = [str(name) for name in dataset.variables if dataset[name].dims == (name,)]
    tests = (
        lambda name, attrs: attrs.get("standard_name") == rule["standard_name"],
        lambda name, attrs: str(attrs.get("units", "")).lower() in rule["units"],
        lambda name, attrs: which == "time" and _holds_times(dataset[name]),
        lambda name, attrs: name.lower() in rule["names"],
        lambda name, attrs: attrs.get("axis") == rule["axis"],
    )
    for test in tests:
        found = [name for name in candidates if test(name, dataset[name].attrs)]
        if found:
            return found[0]
    return None


def _holds_times(coordinate: xr.DataArray) -> bool:
    return np.issubdtype(coordinate.dtype, np.datetime64) or (
        coordinate.dtype == object and coordinate.size > 0 and hasattr(coordinate.values[0], "calendar")
    )


def find_variable(dataset: xr.Dataset, wanted: str, path: str) -> tuple[str, int | None]:
    """(name in the file, index of the pressure level or None) of a wanted variable such as ``t2m`` or ``z500``.

    By the exact name, then whatever the case, then by synonyms, then by CF standard name; then as a variable followed
    by a pressure in hPa, which must then have pressure levels (``u10`` is never ``u`` at 10 hPa). ``DataError`` lists
    what the file holds, or the variables among which the name does not decide.
    """
    names = [str(name) for name in dataset.data_vars]
    name = _by_name(dataset, names, wanted, path)
    if name is not None:
        return name, None
    split = re.fullmatch(r"(.*?[^\d_])_?(\d+)", wanted)
    if split and not any(wanted.lower() in group for group in SYNONYMS):
        on_levels = [x for x in names if _levels_of(dataset, x) is not None]
        name = _by_name(dataset, on_levels, split[1], path)
        if name is not None:
            return name, _level_index(dataset, name, int(split[2]), wanted, path)
    close = difflib.get_close_matches(wanted, names, n=2)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    raise VariableMissingError(
        f"{path}: no variable {wanted}{hint}; the file holds {', '.join(names) or 'no variables'}"
    )


def _by_name(dataset: xr.Dataset, names: list[str], wanted: str, path: str) -> str | None:
    synonyms = next((group for group in SYNONYMS if wanted.lower() in group), {wanted.lower()})
    tests = (
        lambda name: name == wanted,
        lambda name: name.lower() == wanted.lower(),
        lambda name: name.lower() in synonyms,
        lambda name: dataset[name].attrs.get("standard_name") in synonyms,
    )
    for test in tests:
        found = [name for name in names if test(name)]
        if len(found) > 1:
            raise DataError(f"{path}: {wanted} may be {' or '.join(found)}; ask for one by its name in the file")
        if found:
            return found[0]
    return None


def _levels_of(dataset: xr.Dataset, name: str) -> str | None:
    """Name of the pressure coordinate of a variable, a dimension of it or a single value beside it."""
    level = find_coordinate(dataset, "level")
    if level is not None and level in dataset[name].dims:
        return level
    scalars = [str(c) for c in dataset[name].coords if str(c).lower() in COORDINATES["level"]["names"]]
    return next((c for c in scalars if dataset[c].ndim == 0), None)


def _level_index(dataset: xr.Dataset, name: str, wanted_hpa: int, wanted: str, path: str) -> int | None:
    level = _levels_of(dataset, name)
    coordinate = dataset[level]
    in_pascal = str(coordinate.attrs.get("units", "")).lower() in ("pa", "pascal")
    levels = np.atleast_1d(coordinate.values).astype(float) / (100.0 if in_pascal else 1.0)
    found = np.flatnonzero(np.isclose(levels, wanted_hpa))
    if len(found) == 0:
        held = ", ".join(f"{x:g}" for x in levels)
        raise DataError(f"{path}: {wanted} asks for {name} at {wanted_hpa} hPa; the file has {held} hPa")
    return int(found[0]) if level in dataset[name].dims else None
