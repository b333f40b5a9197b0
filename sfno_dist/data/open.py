"""``open_dataset``: fields in canonical form whatever the habits of the files."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import xarray as xr
from xarray.backends.common import BackendArray
from xarray.core import indexing

from sfno_dist.data.checks import files
from sfno_dist.data.errors import DataError, VariableMissingError
from sfno_dist.data.source import SourceFile
from sfno_dist.geometry import Grid


def open_dataset(
    paths: str | os.PathLike | Sequence[str | os.PathLike], variables: str | Sequence[str] | None = None
) -> xr.Dataset:
    """A lazy Dataset of float32 fields on (time, lat, lon), read when they are asked for.

    ``lat`` runs from north to south, ``lon`` eastward from the first meridian at or after 0, ``time`` is sorted and
    unique; units are kept, packing is not. ``attrs["grid"]`` names the kind of the grid.

    Args:
        paths: netCDF or zarr: a path, a glob, or a list; files in any order, overlapping where they agree,
            all variables in each or one in each.
        variables: names, matched exactly, then whatever their case, then by common synonyms (``t2m``, ``2t``,
            ``2m_temperature``); ``z500`` is variable ``z`` at 500 hPa. The fields bear the names asked for.
            Without it: every field on (time, lat, lon), named as in the file.

    Raises ``DataError`` naming the file and the remedy; also later, where a value that is read is NaN or infinite.
    """
    sources = [SourceFile(path) for path in files(paths)]
    grid = _common_grid(sources)
    names = [variables] if isinstance(variables, str) else list(variables or _all_fields(sources))
    if len(set(names)) < len(names):
        raise DataError(f"a variable is named twice in {', '.join(names)}")
    holders = {name: _holders(sources, name) for name in names}
    places = {name: _merge_times(holders[name], name) for name in names}
    times = _common_times(places, holders)
    coordinates = {
        "time": ("time", times),
        "lat": ("lat", sources[0].latitudes, {"standard_name": "latitude", "units": "degrees_north"}),
        "lon": ("lon", grid.longitudes_degrees, {"standard_name": "longitude", "units": "degrees_east"}),
    }
    fields = {}
    for name in names:
        lazy = indexing.LazilyIndexedArray(_Field(name, holders[name], list(places[name].values())))
        fields[name] = (("time", "lat", "lon"), lazy, _common_attributes(holders[name], name))
    return xr.Dataset(fields, coordinates, {"grid": grid.kind})


def open_static(path: str, variable: str) -> xr.DataArray:
    """A field without time, such as relief, in canonical order   [lat, lon] float32"""
    names = files(path)
    if len(names) > 1:
        raise DataError(f"{path}: names {len(names)} files; a field without time comes from one")
    source = SourceFile(names[0])
    rows, columns = np.arange(source.grid.nlat), np.arange(source.grid.nlon)
    _, attributes = source.variable(variable)
    coordinates = {"lat": source.latitudes, "lon": source.grid.longitudes_degrees}
    values = source.read(variable, None, rows, columns)
    return xr.DataArray(values, coordinates, ("lat", "lon"), variable, {"units": attributes.get("units", "")})


class _Field(BackendArray):
    """A variable over all files; knows where each canonical time lies and reads just what is indexed."""

    def __init__(self, name: str, sources: list[SourceFile], places: list[tuple[int, int]]) -> None:
        self.name, self.sources, self.places = name, sources, np.asarray(places)
        self.shape = (len(places), *sources[0].grid.shape)
        self.dtype = np.dtype(np.float32)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> np.ndarray:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple) -> np.ndarray:
        times, rows, columns = (np.atleast_1d(np.arange(n)[part]) for n, part in zip(self.shape, key, strict=True))
        values = np.empty((len(times), len(rows), len(columns)), np.float32)
        files_of = self.places[times, 0]
        for number in np.unique(files_of):
            mine = np.flatnonzero(files_of == number)
            indices = self.places[times[mine], 1]
            values[mine] = self.sources[number].read(self.name, indices, rows, columns)
        scalar = tuple(0 if isinstance(part, (int, np.integer)) else slice(None) for part in key)
        return values[scalar]


def _common_attributes(sources: list[SourceFile], name: str) -> dict:
    """Units and names of a variable; ``DataError`` where the files' units differ."""
    _, attributes = sources[0].variable(name)
    units = attributes.get("units", "")
    for source in sources[1:]:
        other = source.variable(name)[1].get("units", "")
        if other != units:
            raise DataError(
                f"{source.path}: {name} has units {other!r}, {sources[0].path} has {units!r}; convert one of them"
            )
    return {key: attributes[key] for key in ("units", "long_name", "standard_name") if key in attributes}


def _common_grid(sources: list[SourceFile]) -> Grid:
    grid = sources[0].grid
    for source in sources:
        if source.grid != grid:
            raise DataError(
                f"{source.path}: is on grid {source.grid}, {sources[0].path} on {grid}; give files of one grid"
            )
        if source.times.size == 0:
            raise DataError(f"{source.path}: has no time coordinate; fields without time are not samples")
    return grid


def _all_fields(sources: list[SourceFile]) -> list[str]:
    names = list(dict.fromkeys(name for source in sources for name in source.fields()))
    if not names:
        held = ", ".join(map(str, sources[0].dataset))
        raise DataError(f"{sources[0].path}: no variable on (time, lat, lon); the file holds {held}")
    return names


def _holders(sources: list[SourceFile], name: str) -> list[SourceFile]:
    """The files that hold a variable: all of them, or some where each file holds one variable."""
    found, missing = [], None
    for source in sources:
        try:
            source.variable(name)
            found.append(source)
        except VariableMissingError as error:
            missing = error
    if not found and missing:
        raise missing
    return found


def _common_times(places: dict[str, dict], holders: dict[str, list[SourceFile]]) -> np.ndarray:
    """The times of every variable, which must be the same."""
    (first, times), *others = ((name, set(found)) for name, found in places.items())
    for name, found in others:
        if found != times:
            lacking, having, which = (name, first, times - found) if times - found else (first, name, found - times)
            raise DataError(
                f"{holders[lacking][0].path}: {lacking} has no time {np.datetime_as_string(min(which), 's')}, which "
                f"{having} has ({len(which)} such times); give files that cover the same times"
            )
    return np.array(list(places[first]))


def _merge_times(sources: list[SourceFile], name: str) -> dict[np.datetime64, tuple[int, int]]:
    """(file, index in it) of each time, sorted; of a time that comes twice the first, once the values agree."""
    found: dict[np.datetime64, tuple[int, int]] = {}
    for s, source in enumerate(sources):
        for i, time in enumerate(source.times):
            if np.isnat(time):
                raise DataError(f"{source.path}: time number {i} is missing")
            if time in found:
                _refuse_conflict(sources, found[time], (s, i), name)
            found.setdefault(time, (s, i))
    return {time: found[time] for time in sorted(found)}


def _refuse_conflict(sources: list[SourceFile], first: tuple[int, int], second: tuple[int, int], name: str) -> None:
    rows, columns = (np.arange(n) for n in sources[0].grid.shape)
    a, b = (sources[s].read(name, np.array([i]), rows, columns) for s, i in (first, second))
    # Files packed one by one round the same value differently: by about 1/65000 of the range.
    tolerance = 1e-4 * max(float(np.ptp(a)), 1e-6 * float(np.abs(a).max()))
    if np.abs(a - b).max() > tolerance:
        (s, i), (other, _) = second, first
        raise DataError(
            f"{sources[s].path}: values conflict with {sources[other].path}: {name} at time "
            f"{np.datetime_as_string(sources[s].times[i], 's')} differs by {np.abs(a - b).max():g}; remove one of them"
        )
