"""``open_dataset``: fields in canonical form whatever the habits of the files."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

import numpy as np
import xarray as xr
from tqdm import tqdm
from xarray.backends.common import BackendArray
from xarray.core import indexing

from sfno_dist.data.accumulated import accumulation_hours
from sfno_dist.data.checks import files
from sfno_dist.data.errors import DataError, VariableMissingError
from sfno_dist.data.fields import Fields
from sfno_dist.data.merge import Series, common_times
from sfno_dist.data.source import SourceFile
from sfno_dist.data.units import same_units
from sfno_dist.geometry import Grid


def open_dataset(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    variables: str | Sequence[str] | None = None,
    *,
    missing: Collection[str] = (),
    member: int | None = None,
) -> xr.Dataset:
    """A lazy Dataset of float32 fields on (time, lat, lon), read when they are asked for.

    ``lat`` runs from north to south, ``lon`` eastward from the first meridian at or after 0, ``time`` is sorted and
    unique; units are kept, packing is not. ``attrs["grid"]`` names the kind of the grid. Times are datetime64, or
    cftime dates in the calendars of models. ``complete`` [time] is False where the files themselves declare one of the
    variables missing, which then reads as NaN. ``attrs["accumulation_hours"]`` of a variable says over how long it is
    summed. The Dataset holds no open file: it may be pickled, forked, and read by threads.

    Args:
        paths: netCDF, HDF5 or zarr, of the layouts of the Climate Data Store, ARCO-ERA5, CMIP, makani and anemoi: a
            path, a glob, or a list; files in any order, overlapping where they agree, all variables in each or one in
            each.
        variables: names, matched exactly, then whatever their case, then by common synonyms (``t2m``, ``2t``,
            ``2m_temperature``); ``z500`` is variable ``z`` at 500 hPa. The fields bear the names asked for.
            Without it: every field on (time, lat, lon), named as in the file.
        missing: variables that may lack values: they are NaN where the file has ``_FillValue`` or ``missing_value``.
        member: number of the ensemble member to read, where the files hold several.

    Raises ``DataError`` naming the file and the remedy; also later, where a value that is read is infinite, or missing
    in another variable, or where a file has changed since.
    """
    return dataset_of(open_sources(paths, member=member), variables, missing=missing)[0]


def open_sources(
    paths: str | os.PathLike | Sequence[str | os.PathLike], *, member: int | None = None
) -> list[SourceFile]:
    """What the headers of the files say; at least one."""
    sources: list[SourceFile] = []
    for path in tqdm(files(paths), desc="opening files", unit="file", delay=3.0, leave=False):
        sources.append(SourceFile(path, member=member, like=sources[-1] if sources else None))
    return sources


def dataset_of(
    sources: list[SourceFile], variables: str | Sequence[str] | None = None, *, missing: Collection[str] = ()
) -> tuple[xr.Dataset, Fields]:
    """``open_dataset`` of files whose headers have been read, and the reader of its fields."""
    grid, member = _common_grid(sources), sources[0].member
    names = [variables] if isinstance(variables, str) else list(variables or _all_fields(sources))
    missing = (missing,) if isinstance(missing, str) else tuple(missing)
    _check_names(names, missing)
    if member is not None and not any(field.members for source in sources for field in source.fields.values()):
        raise DataError(f"{sources[0].path}: member={member} was asked for, but no file has ensemble members; drop it")
    holders = {name: _holders(sources, name) for name in names}
    _refuse_one_field_twice(holders)
    for name in names:
        _refuse_other_members(name, holders[name])
    merged: dict[tuple[int, ...], Series] = {}
    series = {}
    for name in names:
        key = tuple(map(id, holders[name]))
        merged.setdefault(key, Series.of(holders[name]))
        series[name] = merged[key]
        series[name].refuse_conflicts(name, may_miss=name in missing)
        holders[name][0].check_seam(name)
    times = common_times(series)
    complete = np.ones(len(times), bool)
    reader = Fields(series, missing)
    fields = {}
    for name in names:
        complete &= series[name].complete(name)
        lazy = indexing.LazilyIndexedArray(_Field(name, reader))
        fields[name] = (("time", "lat", "lon"), lazy, _common_attributes(holders[name], name, times))
    coordinates = {
        "time": ("time", times),
        "lat": ("lat", sources[0].latitudes, {"standard_name": "latitude", "units": "degrees_north"}),
        "lon": ("lon", grid.longitudes_degrees, {"standard_name": "longitude", "units": "degrees_east"}),
        "complete": ("time", complete, {"long_name": "whether the files declare no variable missing"}),
    }
    return xr.Dataset(fields, coordinates, {"grid": grid.kind}), reader


def open_static(
    path: str, variable: str, *, window: Callable[[Grid], tuple[np.ndarray, np.ndarray]] | None = None
) -> xr.DataArray:
    """A field without time, such as relief, in canonical order   [lat, lon] float32

    ``window`` gives the rows and columns of the file's grid to read, rising; by default all.
    """
    names = files(path)
    if len(names) > 1:
        raise DataError(f"{path}: names {len(names)} files; a field without time comes from one")
    source = SourceFile(names[0])
    rows, columns = window(source.grid) if window else (np.arange(n) for n in source.grid.shape)
    field = source.variable(variable)
    source.check_seam(variable)
    coordinates = {"lat": source.latitudes[rows], "lon": source.grid.longitudes_degrees[columns]}
    in_time = source.dims["time"] in field.dims
    if in_time and source.times.size != 1:
        raise DataError(f"{path}: {variable} has {source.times.size} times; give a field without time, or at one")
    values = source.read([variable], np.array([0]) if in_time else None, rows, columns).fields[0, 0]
    units = {"units": field.attributes.get("units", "")}
    return xr.DataArray(values, coordinates, ("lat", "lon"), variable, units)


class _Field(BackendArray):
    """A variable over all files, for xarray to index."""

    def __init__(self, name: str, fields: Fields) -> None:
        self.name, self.fields = name, fields
        series = fields.series[name]
        self.shape = (len(series.places), *series.sources[0].grid.shape)
        self.dtype = np.dtype(np.float32)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> np.ndarray:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple) -> np.ndarray:
        times, rows, columns = (np.atleast_1d(np.arange(n)[part]) for n, part in zip(self.shape, key, strict=True))
        values = self.fields.read([self.name], times, rows, columns)[:, 0]
        scalar = tuple(0 if isinstance(part, (int, np.integer)) else slice(None) for part in key)
        return values[scalar]


def _check_names(names: list[str], missing: Collection[str]) -> None:
    if len(set(names)) < len(names):
        raise DataError(f"a variable is named twice in {', '.join(names)}")
    unknown = sorted(set(missing) - set(names))
    if unknown:
        raise DataError(f"the option 'missing' names {', '.join(unknown)}, not among the variables {', '.join(names)}")


def _refuse_one_field_twice(holders: dict[str, list[SourceFile]]) -> None:
    seen: dict[tuple, str] = {}
    for name, sources in holders.items():
        source = sources[0]
        key = (source.path, *source.stored_name(name))
        if key in seen:
            raise DataError(f"{source.path}: {seen[key]} and {name} are the same variable {key[1]}; name it once")
        seen[key] = name


def _refuse_other_members(name: str, sources: list[SourceFile]) -> None:
    """``DataError`` where the files of a variable would give different ensemble members."""
    first, member = sources[0], sources[0].member_of(name)
    for source in sources[1:]:
        other = source.member_of(name) if source.fields is not first.fields else member
        if member is None and first.member is None:
            first, member = source, other
        elif other != member and (source.member is not None or other is not None):
            what = [f"holds member {x}" if x is not None else "tells of no ensemble members" for x in (other, member)]
            raise DataError(f"{source.path}: {what[0]} of {name}, {first.path} {what[1]}; give files of one member")


def _common_attributes(sources: list[SourceFile], name: str, times: np.ndarray) -> dict:
    """Units and names of a variable; ``DataError`` where the files' units differ."""
    attributes = sources[0].variable(name).attributes
    units = str(attributes.get("units", ""))
    seen = {units}
    for source in sources[1:]:
        other = str(source.fields[source.stored_name(name)[0]].attributes.get("units", ""))
        if other not in seen and not same_units(other, units):
            raise DataError(
                f"{source.path}: {name} has units {other!r}, {sources[0].path} has {units!r}; convert one of them"
            )
        seen.add(other)
    hours = accumulation_hours(sources[0].stored_name(name)[0], attributes, times)
    return dict(attributes) if hours is None else {**attributes, "accumulation_hours": hours}


def _common_grid(sources: list[SourceFile]) -> Grid:
    first = sources[0]
    for source in sources:
        if source.grid != first.grid and not _same_points(source, first):
            raise DataError(
                f"{source.path}: is on grid {source.grid}, {first.path} on {first.grid}; give files of one grid"
            )
        if source.times.size == 0:
            what = (
                f"its time axis {source.dims['time']} holds no time"
                if source.dims["time"]
                else "has no time coordinate"
            )
            raise DataError(f"{source.path}: {what}; fields without time are not samples")
        if source.calendar != first.calendar:
            raise DataError(
                f"{source.path}: counts in the {source.calendar} calendar, {first.path} in {first.calendar}; give "
                f"files of one calendar"
            )
    return first.grid


def _same_points(a: SourceFile, b: SourceFile) -> bool:
    """Whether two grids differ by the rounding of their coordinates only."""
    if a.grid.shape != b.grid.shape or a.grid.kind != b.grid.kind:
        return False
    turn = abs(a.grid.first_longitude - b.grid.first_longitude)
    near = 0.01 * np.abs(np.diff(b.latitudes)).min()
    return turn < 0.01 * 360.0 / b.grid.nlon and bool(np.abs(a.latitudes - b.latitudes).max() < near)


def _all_fields(sources: list[SourceFile]) -> list[str]:
    names = list(dict.fromkeys(name for source in sources for name in source.field_names()))
    if not names:
        held = ", ".join(sources[0].fields) or "no fields"
        raise DataError(f"{sources[0].path}: no variable on (time, lat, lon) alone; the file holds {held}")
    return names


def _holders(sources: list[SourceFile], name: str) -> list[SourceFile]:
    """The files that hold a variable: all of them, or some where each file holds one variable."""
    found: list[SourceFile] = []
    missing = None
    for source in sources:
        try:
            source.variable(name) if not found or source.fields is not found[-1].fields else None
            found.append(source)
        except VariableMissingError as error:
            missing = error
    if not found and missing:
        raise missing
    return found
