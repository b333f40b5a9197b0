"""One file: what it holds, and how its points go into canonical order.

Canonical: (time, lat, lon), lat from north to south, lon eastward from the first meridian at or after 0. A source keeps
what it learned from the file's header and no handle, so it may be pickled, forked and used by any thread.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import xarray as xr

from sfno_dist.data import anemoi, makani, plain
from sfno_dist.data.blocks import BlockReader, Together, together
from sfno_dist.data.calendars import calendar_of, instants
from sfno_dist.data.checks import check_fields, check_file, unreadable
from sfno_dist.data.contents import Contents, StoredField
from sfno_dist.data.coordinates import canonical_axes
from sfno_dist.data.errors import DataError
from sfno_dist.data.handles import OpenFile, open_files, stamp
from sfno_dist.data.names import find_variable, quantity_of
from sfno_dist.data.units import implausible
from sfno_dist.geometry import GridError

# Codes of missing values that no well-known variable has as a value.
FILL_CODES = {-999.0, -9999.0, -99999.0, 9999.0, 99999.0, 999999.0, -32767.0, -32768.0}


class Values(NamedTuple):
    """``fields`` [times, variables, rows, columns] float32; ``lowest`` and ``highest`` [variables] of those not NaN."""

    fields: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray


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
                _refuse_absent_coordinates(opened, path)
                contents = _contents(opened.dataset, path)
            self._stamp = stamp(path)
        except DataError:
            raise
        except Exception as error:  # what damaged files raise is of many types
            raise unreadable(path, error) from error
        self.fields = contents.fields
        self._found: dict[str, tuple[str, int | None]] = {}
        self._quantities: dict[str, tuple] = {}
        if like is not None and like.fields == contents.fields:
            self.fields, self._found = like.fields, like._found
        self.dims = contents.dims
        shape = (contents.latitudes.size, contents.longitudes.size)
        self._blocks = BlockReader(path, contents.dims, shape, contents.cell_dim, contents.cells_by_column)
        self._absent, self.expver_ranks = contents.absent, contents.expver_ranks
        self.times, self._time_indices = contents.times, contents.time_indices
        self.instants, self.calendar = instants(self.times), calendar_of(self.times)
        try:
            axes = canonical_axes(contents.latitudes.tobytes(), contents.longitudes.tobytes())
        except GridError as error:
            raise DataError(f"{path}: {error}") from error
        # rows[r] and columns[j]: where canonical row r and column j lie in the file.
        self.grid, self.rows, self.columns, self.latitudes, self.seam = axes

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
        self,
        wanted: Sequence[str],
        times: np.ndarray | None,
        rows: np.ndarray,
        columns: np.ndarray,
        *,
        may_miss: Collection[str] = (),
    ) -> Values:
        """Checked values at ``times`` of the file and canonical rows and columns   [times, variables, rows, columns]

        Of fields without time where ``times`` is None. Values are NaN at times that the file declares missing, and
        of variables in ``may_miss`` wherever they are missing; else ``DataError``, as for a file that changed.
        """
        places = np.zeros(1, np.int64) if times is None else np.atleast_1d(times)
        gaps = self._absent and times is not None
        if not gaps or not any(np.isin(places, self.absent_times(name)).any() for name in wanted):
            return self._read_present(wanted, places, rows, columns, may_miss)
        shape = (len(places), len(wanted), len(rows), len(columns))
        found = Values(np.full(shape, np.nan, np.float32), np.full(len(wanted), np.nan), np.full(len(wanted), np.nan))
        for number, name in enumerate(wanted):
            present = np.flatnonzero(~np.isin(places, self.absent_times(name)))
            if present.size:
                one = self._read_present([name], places[present], rows, columns, may_miss)
                found.fields[present, number] = one.fields[:, 0]
                found.lowest[number], found.highest[number] = one.lowest[0], one.highest[0]
        return found

    def _read_present(self, wanted, places, rows, columns, may_miss) -> Values:
        values = np.empty((len(places), len(wanted), len(rows), len(columns)), np.float32)
        # None for fields without time
        stored = self._time_indices[places] if self.dims["time"] and self.times.size else None
        at_rows, at_columns = self.rows[rows], self.columns[columns]
        what = ", ".join(wanted)
        try:
            now = stamp(self.path)
            if now != self._stamp:
                raise DataError(f"{self.path}: has changed since it was opened; start again once it is written")
            with open_files.opened(self.path, now) as opened:
                for part in self._plan(opened, tuple(wanted), may_miss):
                    what = wanted[part.numbers[0]]
                    in_time = stored if self.dims["time"] in part.field.dims else None
                    self._blocks.fill(values, opened.array(part.field.array), part, (in_time, at_rows, at_columns))
        except DataError:
            raise
        except Exception as error:  # codecs and disks raise errors of many types
            raise unreadable(self.path, error, what) from error
        checked = check_fields(
            values, wanted, times=self.times[places] if stored is not None else self.times[:0], source=self.path,
            stored_as=lambda name: self.fields[self.stored_name(name)[0]].dtype, may_miss=may_miss,
        )  # fmt: skip
        return Values(values, *checked)

    def _plan(self, opened: OpenFile, wanted: tuple[str, ...], may_miss: Collection[str]) -> list[Together]:
        """What is read as one, kept as long as the file is open."""
        key = (self.member, wanted, tuple(may_miss))
        if key not in opened.plans:
            fields = [(self.variable(name), name in may_miss) for name in wanted]
            opened.plans[key] = together(fields, lambda field: opened.array(field.array).layout)
        return opened.plans[key]

    def check_seam(self, wanted: str) -> None:
        """``DataError`` where columns that repeat a meridian differ from it, at the first time."""
        if not self.seam:
            return
        times = self._time_indices[:1] if self.dims["time"] in self.variable(wanted).dims else None
        with open_files.opened(self.path) as opened:
            (part,) = self._plan(opened, (wanted,), (wanted,))
            for kept, repeated in self.seam:
                a, b = np.empty((2, 1, 1, self.rows.size, 1), np.float32)
                for values, column in ((a, kept), (b, repeated)):
                    at = (times, self.rows, np.array([column]))
                    self._blocks.fill(values, opened.array(part.field.array), part, at)
                if not np.allclose(
                    a, b, rtol=1e-4, atol=1e-4 * float(np.nanmax(np.abs(a), initial=0.0)), equal_nan=True
                ):
                    raise DataError(
                        f"{self.path}: {wanted} differs between columns {kept} and {repeated}, which have the same "
                        f"longitude; mend the file or remove one of them"
                    )

    def warn_implausible(self, wanted: str, low: float, high: float) -> bool:
        """Warns where values ``low`` .. ``high`` do not fit the units of a well-known variable; whether it did.

        ``DataError`` where the one that does not fit is a common code of missing values.
        """
        if wanted not in self._quantities:
            self._quantities[wanted] = self._quantity(wanted)
        quantity, units, level = self._quantities[wanted]
        odd = implausible(quantity, units, low, high, level) if quantity is not None and low <= high else None
        code = next((x for x in (low, high) if odd and x in FILL_CODES), None)
        if code is not None:
            raise DataError(
                f"{self.path}: {wanted} has {odd}: {code:g} is a fill code that the file does not declare; set its "
                f"_FillValue to {code:g}"
            )
        if odd:
            warnings.warn(f"{self.path}: {wanted} has {odd}; check its units", stacklevel=2)
        return odd is not None

    def _quantity(self, wanted: str) -> tuple[str | None, str, float | None]:
        """(short name of a well-known variable, units, level in hPa)."""
        name, index = self.stored_name(wanted)
        field = self.fields[name]
        level = field.levels[index or 0] if field.levels and (index is not None or not field.level_dim) else None
        base = name.rstrip("0123456789").rstrip("_") if quantity_of(name, {}) is None else name
        quantity = quantity_of(name, field.attributes) or quantity_of(base, {})
        return quantity, str(field.attributes.get("units", "")), level


def _refuse_absent_coordinates(opened: OpenFile, path: str) -> None:
    """``DataError`` where values of a coordinate were never written: they would read as 0, time and place alike.

    One value may be: zarr leaves out a chunk that holds nothing but 0.
    """
    for name, variable in opened.dataset.variables.items():
        if variable.ndim != 1 or variable.dtype.kind not in "iufM":
            continue
        on_disk = opened.array(str(name)).on_disk
        found = on_disk.absent((slice(0, variable.size),)) if on_disk is not None else []
        if on_disk and sum(min(box[0].stop, variable.size) - box[0].start for _, box in found) > 1:
            raise DataError(f"{path}: chunk {name}/{found[0][0]} {on_disk.absent_text}")


def _contents(dataset: xr.Dataset, path: str) -> Contents:
    if anemoi.is_anemoi(dataset):
        return anemoi.read_contents(dataset, path)
    if makani.is_makani(dataset, path):
        return makani.read_contents(dataset, path)
    return plain.read_contents(dataset, path)
