"""One file: what it holds, and how its points go into canonical order.

Canonical: (time, lat, lon), lat from north to south, lon eastward from the first meridian at or after 0. A source keeps
what it learned from the file's header and no handle, so it may be pickled, forked and used by any thread.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from dataclasses import replace
from functools import lru_cache

import numpy as np
import xarray as xr

from sfno_dist.data import anemoi, makani, plain
from sfno_dist.data.calendars import calendar_of, instants
from sfno_dist.data.checks import check_file, check_values, unreadable
from sfno_dist.data.contents import Contents, StoredField
from sfno_dist.data.errors import DataError
from sfno_dist.data.handles import open_files, stamp
from sfno_dist.data.ledger import LEDGER
from sfno_dist.data.names import find_variable, quantity_of
from sfno_dist.data.units import implausible
from sfno_dist.geometry import Grid, GridError

# More parts than this are read as one block and picked from it.
MOST_PARTS = 3


class SourceFile:
    """A file that ``DataError`` refuses when it is unreadable or its points are no global grid.

    ``grid`` of its points; ``times`` [n] datetime64[ns], or cftime dates of other calendars, in the file's order,
    empty for a field without time; ``instants`` [n] int64, the same in microseconds since 1970 of their calendar.
    ``member`` is the ensemble member to read where there are several; ``like`` a file of the same series, with which
    equal descriptions are shared.
    """

    def __init__(self, path: str, *, member: int | None = None, like: SourceFile | None = None) -> None:
        self.path, self.member = path, member
        weakref.finalize(self, open_files.close, path)
        check_file(path)
        try:
            with open_files.opened(path) as opened:
                contents = _contents(opened.dataset, path)
            self._stamp = stamp(path)
        except DataError:
            raise
        except Exception as error:  # what damaged files raise is of many types
            raise unreadable(path, error) from error
        self.fields = contents.fields
        self._found: dict[str, tuple[str, int | None]] = {}
        if like is not None and like.fields == contents.fields:
            self.fields, self._found = like.fields, like._found
        self.dims, self._cell_dim, self._by_column = contents.dims, contents.cell_dim, contents.cells_by_column
        self._absent, self.expver_ranks = contents.absent, contents.expver_ranks
        self.times, self._time_indices = contents.times, contents.time_indices
        self.instants, self.calendar = instants(self.times), calendar_of(self.times)
        try:
            axes = _axes(contents.latitudes.tobytes(), contents.longitudes.tobytes())
        except GridError as error:
            raise DataError(f"{path}: {error}") from error
        # rows[r] and columns[j]: where canonical row r and column j lie in the file.
        self.grid, self.rows, self.columns, self.latitudes, self.seam = axes
        self._shape_in_file = (contents.latitudes.size, contents.longitudes.size)

    def variable(self, wanted: str) -> StoredField:
        """The stored field of a wanted variable, at one level and member; ``DataError`` where it is not one field."""
        name, level = self.stored_name(wanted)
        field = self.fields[name]
        fixed = dict(field.fixed)
        if level is not None and field.level_dim:
            fixed[field.level_dim] = level
        member = self._member_index(field, name)
        if field.member_dim:
            fixed[field.member_dim] = member
        free = [d for d in field.dims if d not in fixed and d not in self.dims.values() and d != field.expver_dim]
        longer = [f"{d} ({field.size_of[d]})" for d in free if field.size_of[d] != 1]
        if longer:
            remedy = f"name one level like {name}{field.levels[0]:g}" if field.levels else "take one of them first"
            raise DataError(f"{self.path}: {name} has the further dimension {', '.join(longer)}; {remedy}")
        fixed.update(dict.fromkeys(free, 0))
        return replace(field, fixed=tuple(fixed.items()))

    def stored_name(self, wanted: str) -> tuple[str, int | None]:
        """(name in the file, index of the level) of a wanted variable."""
        if wanted not in self._found:
            self._found[wanted] = find_variable(self.fields, wanted, self.path)
        return self._found[wanted]

    def member_of(self, wanted: str) -> int | None:
        """Number of the ensemble member that is read; None where the file does not tell of any."""
        name, _ = self.stored_name(wanted)
        field = self.fields[name]
        return field.members[self._member_index(field, name)] if field.members else None

    def _member_index(self, field: StoredField, name: str) -> int:
        held = ", ".join(map(str, field.members))
        if not field.members or (self.member is None and len(field.members) == 1):
            return 0
        if self.member is None:
            raise DataError(
                f"{self.path}: {name} has {len(field.members)} ensemble members (along {field.member_dim}: {held}); "
                f"choose one, such as member={field.members[0]}"
            )
        if self.member not in field.members:
            raise DataError(f"{self.path}: {name} has no member {self.member}; its members are {held}")
        if field.members.count(self.member) > 1:
            raise DataError(f"{self.path}: {name} has member {self.member} more than once ({held}); mend the file")
        return field.members.index(self.member)

    def field_names(self) -> list[str]:
        """Names of all fields on (time, lat, lon), further dims of length 1, members and expver aside."""
        return [name for name, field in self.fields.items() if self._is_one_field(field)]

    def _is_one_field(self, field: StoredField) -> bool:
        aside = {*self.dims.values(), *dict(field.fixed), field.member_dim, field.expver_dim}
        in_time = self.dims["time"] is None or self.dims["time"] in field.dims
        return in_time and all(field.size_of[d] == 1 for d in field.dims if d not in aside)

    def absent_times(self, wanted: str) -> np.ndarray:
        """Places in ``times`` where the file itself declares the variable missing."""
        return self._absent.get(self.stored_name(wanted)[0], self._absent.get("", np.empty(0, np.int64)))

    def read(
        self, wanted: str, times: np.ndarray | None, rows: np.ndarray, columns: np.ndarray, *, may_miss: bool = False
    ) -> np.ndarray:
        """Checked values at ``times`` of the file and canonical rows and columns   [times, rows, columns] float32

        Without ``times`` a field without them   [rows, columns]. Values are NaN at times that the file declares
        missing, and with ``may_miss`` wherever they are missing; else ``DataError``, as for a file that changed.
        """
        field = self.variable(wanted)
        places = np.arange(1) if times is None else np.atleast_1d(times)
        absent = np.isin(places, self.absent_times(wanted)) if times is not None else np.zeros(1, bool)
        if absent.any():
            values = np.full((len(places), len(rows), len(columns)), np.nan, np.float32)
            if not absent.all():
                values[~absent] = self.read(wanted, places[~absent], rows, columns, may_miss=may_miss)
            return values
        in_time = self.dims["time"] in field.dims
        stored = self._time_indices[places] if in_time else None
        try:
            now = stamp(self.path)
            if now != self._stamp:
                raise DataError(f"{self.path}: has changed since it was opened; start again once it is written")
            with open_files.opened(self.path, now) as opened:
                values = self._read(opened, field, stored, self.rows[rows], self.columns[columns], may_miss)
        except DataError:
            raise
        except Exception as error:  # codecs and disks raise errors of many types
            raise unreadable(self.path, error, wanted) from error
        moments = self.times[places] if times is not None and self.times.size else np.empty(0)
        check_values(
            values, variable=wanted, times=moments if in_time else moments[:1], source=self.path,
            stored=field.dtype, may_miss=may_miss,
        )  # fmt: skip
        return values if times is not None else values[0]

    def _read(self, opened, field, times, rows, columns, may_miss) -> np.ndarray:
        """Values at indices of the file   [times, rows, columns] float32"""
        if field.expver_dim is None:
            return self._gather(opened, field, times, rows, columns, may_miss)
        order = iter(field.expver_order)

        def of(index: int) -> np.ndarray:
            one = replace(field, fixed=(*field.fixed, (field.expver_dim, index)), expver_dim=None)
            return self._gather(opened, one, times, rows, columns, True)

        values = of(next(order))
        for index in order:
            gaps = np.isnan(values)
            if gaps.any():
                values[gaps] = of(index)[gaps]
        return values

    def _gather(self, opened, field, times, rows, columns, may_miss) -> np.ndarray:
        """Joins the blocks of consecutive times, rows and columns that the indices make."""
        array = opened.array(field.array)
        in_time = np.zeros(1, np.int64) if times is None else times
        wanted = ((in_time, None), (rows, MOST_PARTS), (columns, MOST_PARTS))
        parts = [_parts(np.asarray(x, np.int64).tobytes(), most) for x, most in wanted]
        values = np.empty((1 if times is None else len(times), len(rows), len(columns)), np.float32)
        for (at_times, time, t), (at_rows, row, r), (at_columns, column, c) in itertools.product(*parts):
            block = self._read_block(array, field, None if times is None else time, row, column, may_miss)
            values[at_times, at_rows, at_columns] = block[t][:, r][:, :, c]
        return values

    def _read_block(self, array, field, times, rows, columns, may_miss) -> np.ndarray:
        """The one place where values are read: one block of one array   [times, rows, columns], of the file's type"""
        fixed = dict(field.fixed)
        nlat, nlon = self._shape_in_file
        by_dim = {self.dims["time"]: times} if times is not None else {}
        if self._cell_dim is None:
            by_dim |= {self.dims["lat"]: rows, self.dims["lon"]: columns}
        else:
            slow, length = (columns, nlat) if self._by_column else (rows, nlon)
            by_dim[self._cell_dim] = slice(slow.start * length, slow.stop * length)
        key = tuple(by_dim[d] if d in by_dim else slice(fixed[d], fixed[d] + 1) for d in field.dims)
        block = LEDGER.read(array, key, path=self.path, name=field.array)
        if array.on_disk is not None:
            block = self._blank_absent_chunks(block, array.on_disk, field, key, may_miss)
        rest = [axis for axis, d in enumerate(field.dims) if d not in by_dim]
        axes = [field.dims.index(d) for d in by_dim]
        values = block.transpose(*rest, *axes)
        values = values.reshape(-1, *values.shape[len(rest) + (times is not None) :])
        if self._cell_dim is None:
            return values
        if self._by_column:
            return values.reshape(len(values), -1, nlat).transpose(0, 2, 1)[:, rows]
        return values.reshape(len(values), -1, nlon)[:, :, columns]

    def _blank_absent_chunks(self, values, on_disk, field, key, may_miss) -> np.ndarray:
        """NaN where chunks of a zarr store do not exist, or ``DataError``."""
        for name, box in on_disk.absent(key):
            if not may_miss:
                raise DataError(
                    f"{self.path}: chunk {field.array}/{name} does not exist, so its values would be a constant; copy "
                    f"the store again, or write it with write_empty_chunks=True where they are that constant"
                )
            inside = [
                slice(max(b.start - k.start, 0), max(min(b.stop, k.stop) - k.start, 0))
                for b, k in zip(box, key, strict=True)
            ]
            values = values.astype(np.result_type(values, np.float32), copy=values.base is not None)
            values[tuple(inside)] = np.nan
        return values

    def check_seam(self, wanted: str) -> None:
        """``DataError`` where columns that repeat a meridian differ from it, at the first time."""
        if not self.seam:
            return
        field, rows = self.variable(wanted), self.rows
        times = self._time_indices[:1] if self.dims["time"] in field.dims else None
        with open_files.opened(self.path) as opened:
            for kept, repeated in self.seam:
                a, b = (self._read(opened, field, times, rows, np.array([x]), True) for x in (kept, repeated))
                if not np.allclose(
                    a, b, rtol=1e-4, atol=1e-4 * float(np.nanmax(np.abs(a), initial=0.0)), equal_nan=True
                ):
                    raise DataError(
                        f"{self.path}: {wanted} differs between columns {kept} and {repeated}, which have the same "
                        f"longitude; mend the file or remove one of them"
                    )

    def warn_implausible(self, wanted: str, values: np.ndarray) -> bool:
        """Warns where values do not fit the units of a well-known variable; whether it did."""
        if values.size == 0:
            return False
        name, index = self.stored_name(wanted)
        field = self.fields[name]
        level = field.levels[index or 0] if field.levels and (index is not None or not field.level_dim) else None
        base = name.rstrip("0123456789").rstrip("_") if quantity_of(name, {}) is None else name
        quantity = quantity_of(name, field.attributes) or quantity_of(base, {})
        if quantity is None:
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of slices that are all NaN
            low, high = float(np.nanmin(values)), float(np.nanmax(values))
        odd = implausible(quantity, str(field.attributes.get("units", "")), low, high, level)
        if odd:
            warnings.warn(f"{self.path}: {wanted} has {odd}; check its units", stacklevel=2)
        return odd is not None


def _contents(dataset: xr.Dataset, path: str) -> Contents:
    if anemoi.is_anemoi(dataset):
        return anemoi.read_contents(dataset, path)
    if makani.is_makani(dataset, path):
        return makani.read_contents(dataset, path)
    return plain.read_contents(dataset, path)


@lru_cache(maxsize=16)
def _axes(latitudes: bytes, longitudes: bytes):
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


@lru_cache(maxsize=1024)
def _parts(places: bytes, most: int | None) -> list[tuple]:
    """(places among the indices, block in the file, which of the block) for runs of neighbouring indices."""
    indices = np.frombuffer(places, np.int64)
    if len(indices) == 0:
        return []
    steps = np.diff(indices)
    near = np.abs(steps) == 1
    turns = np.append(False, near[1:] & near[:-1] & (steps[1:] != steps[:-1]))[: len(steps)]
    breaks = np.flatnonzero(~near | turns) + 1
    runs = np.split(np.arange(len(indices)), breaks)
    first, extent = int(indices.min()), int(np.ptp(indices)) + 1
    # A whole ring that begins elsewhere is one block: two would each decompress the same chunks.
    if most is not None and (len(runs) > most or (len(runs) > 1 and 2 * len(indices) > extent)):
        return [(slice(None), slice(first, int(indices.max()) + 1), indices - first)]
    parts = []
    for run in runs:
        part = indices[run]
        backwards = len(part) > 1 and part[1] < part[0]
        parts.append(
            (
                slice(int(run[0]), int(run[-1]) + 1),
                slice(int(part.min()), int(part.max()) + 1),
                slice(None, None, -1) if backwards else slice(None),
            )
        )
    return parts
