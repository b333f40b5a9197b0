"""``open_dataset``: fields in canonical form whatever the habits of the files."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import xarray as xr
from xarray.backends.common import BackendArray
from xarray.core import indexing

from sfno_dist.data.checks import files
from sfno_dist.data.errors import DataError
from sfno_dist.data.source import SourceFile


def open_dataset(
    paths: str | os.PathLike | Sequence[str | os.PathLike], variables: str | Sequence[str] | None = None
) -> xr.Dataset:
    """A lazy Dataset of float32 fields on (time, lat, lon), read when they are asked for.

    ``lat`` runs from north to south, ``lon`` eastward from the first meridian at or after 0, ``time`` is sorted and
    unique; units are kept, packing is not. ``attrs["grid"]`` names the kind of the grid.

    Args:
        paths: netCDF or zarr: a path, a glob, or a list; files in any order, overlapping where they agree.
        variables: names, matched exactly, then whatever their case, then by common synonyms (``t2m``, ``2t``,
            ``2m_temperature``); ``z500`` is variable ``z`` at 500 hPa. The fields bear the names asked for.
            Without it: every field on (time, lat, lon), named as in the file.

    Raises ``DataError`` naming the file and the remedy; also later, where a value that is read is NaN or infinite.
    """
    sources = [SourceFile(path) for path in files(paths)]
    names = [variables] if isinstance(variables, str) else list(variables or sources[0].fields())
    if not names:
        held = ", ".join(map(str, sources[0].dataset))
        raise DataError(f"{sources[0].path}: no variable on (time, lat, lon); the file holds {held}")
    if len(set(names)) < len(names):
        raise DataError(f"a variable is named twice in {', '.join(names)}")
    grid = sources[0].grid
    attributes = {name: _common_attributes(sources, name) for name in names}
    for source in sources:
        if source.grid != grid:
            raise DataError(
                f"{source.path}: is on grid {source.grid}, {sources[0].path} on {grid}; give files of one grid"
            )
        if source.times.size == 0:
            raise DataError(f"{source.path}: has no time coordinate; fields without time are not samples")
    places = _merge_times(sources, names)
    times = np.array([sources[s].times[i] for s, i in places])
    coordinates = {
        "time": ("time", times),
        "lat": ("lat", sources[0].latitudes, {"standard_name": "latitude", "units": "degrees_north"}),
        "lon": ("lon", grid.longitudes_degrees, {"standard_name": "longitude", "units": "degrees_east"}),
    }
    fields = {
        name: (("time", "lat", "lon"), indexing.LazilyIndexedArray(_Field(name, sources, places)), attributes[name])
        for name in names
    }
    return xr.Dataset(fields, coordinates, {"grid": grid.kind})


def open_static(path: str, variable: str) -> xr.DataArray:
    """A field without time, such as relief, in canonical order   [lat, lon] float32"""
    (source,) = [SourceFile(name) for name in files(path)]
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


def _merge_times(sources: list[SourceFile], names: list[str]) -> list[tuple[int, int]]:
    """(file, index in it) of each time, sorted; of a time that comes twice the first, once the values agree."""
    found: dict[np.datetime64, tuple[int, int]] = {}
    for s, source in enumerate(sources):
        for i, time in enumerate(source.times):
            if np.isnat(time):
                raise DataError(f"{source.path}: time number {i} is missing")
            if time in found:
                _refuse_conflict(sources, found[time], (s, i), names)
            found.setdefault(time, (s, i))
    return [found[time] for time in sorted(found)]


def _refuse_conflict(
    sources: list[SourceFile], first: tuple[int, int], second: tuple[int, int], names: list[str]
) -> None:
    whole = (np.arange(n) for n in sources[0].grid.shape)
    rows, columns = whole
    for name in names:
        a, b = (sources[s].read(name, np.array([i]), rows, columns) for s, i in (first, second))
        # Files packed one by one round the same value differently: by about 1/65000 of the range.
        tolerance = 1e-4 * max(float(np.ptp(a)), 1e-6 * float(np.abs(a).max()))
        if np.abs(a - b).max() > tolerance:
            (s, i), (other, _) = second, first
            raise DataError(
                f"{sources[s].path}: values conflict with {sources[other].path}: {name} at time "
                f"{np.datetime_as_string(sources[s].times[i], 's')} differs by "
                f"{np.abs(a - b).max():g}; remove one of them"
            )
