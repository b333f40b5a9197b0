"""What a season usually brings: from a period of the truth, or from a file.

Dims: T times, H rows, W columns.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from sfno_dist.data import DataError
from sfno_dist.data.calendars import as_gregorian
from sfno_dist.data.timeline import period
from sfno_dist.data.units import same_units
from sfno_dist.scores.forecasts import Forecasts
from sfno_dist.scores.stored import Stored, StoredFile, check_same_grid
from sfno_dist.scores.truth import Truth

DAYS = 366
HALF_WINDOW = 30  # days
MONTHS = 12


def seasons(times: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Month from 0, day of the year from 0 and minute of the day of times [T] in any calendar   [T] each"""
    dates = as_gregorian(times)
    days = dates.astype("datetime64[D]")
    months = dates.astype("datetime64[M]").astype(int) % MONTHS
    minutes = (dates - days.astype("datetime64[ns]")).astype("timedelta64[m]").astype(int)
    return months, (days - dates.astype("datetime64[Y]").astype("datetime64[D]")).astype(int), minutes


class PeriodClimatology:
    """Means over the years of a period of the truth.

    Of monthly data: of each month. Otherwise of each day of the year and time of day, in a window of 61 days whose
    weights fall linearly to 0 at 30 days on either side, as WeatherBench 2 has it (Rasp et al. 2024); day 366 of a year
    without one is its day 365. Sums by day lie in a scratch file (in TMPDIR), so that memory does not grow with the
    period; only days within a window of ``wanted``, the times to be scored, are read.
    """

    def __init__(self, truth: Truth, names: Sequence[str], first: str, last: str, wanted: np.ndarray) -> None:
        self.names, self.monthly = list(names), truth.unit.unit == "months"
        self._begin, self._end = period(first, last, "--climatology")
        dates = as_gregorian(truth.times)
        inside = np.flatnonzero((dates >= self._begin) & (dates <= self._end))
        if len(inside) == 0:
            raise DataError(f"--climatology {first}:{last}: no time of {truth.path} lies in it; it runs {truth.extent}")
        self.description = (
            f"truth of {first} to {last}, {'by month' if self.monthly else 'by day of the year and hour'}"
        )
        self._minutes = np.unique(seasons(wanted)[2]) if not self.monthly else np.zeros(1, int)
        self._needed = np.zeros(MONTHS if self.monthly else (DAYS, len(self._minutes)), bool)
        for slots, _ in map(self._window, wanted):
            self._needed[slots] = True
        shape = (*self._needed.shape, len(self.names), *truth.grid.shape)
        _check_scratch(int(self._needed.sum()) * int(np.prod(shape[self._needed.ndim :])))
        self._sums, self._counts = _scratch(shape, np.float32), _scratch(shape, np.uint16)
        self._filled = np.zeros(self._needed.shape, bool)
        for index in tqdm(inside, desc="climatology", unit="time", leave=False):
            self._add(truth, index)

    def __call__(self, name: str, time: Any) -> np.ndarray:
        """The field for the season of ``time``, NaN where the period has none   [H, W] float32"""
        slots, weights = self._window(time)
        v = self.names.index(name)
        sums, counts = (x[(*slots, v)] for x in (self._sums, self._counts))  # [slots, H, W]
        total = np.tensordot(weights, counts, 1)
        field = np.full(total.shape, np.nan)
        return np.divide(np.tensordot(weights, sums, 1), total, out=field, where=total > 0).astype(np.float32)

    def has(self, time: Any) -> bool:
        return bool(self._filled[self._window(time)[0]].any())

    def saw(self, time: Any) -> bool:
        return bool(self._begin <= as_gregorian(np.array([time]))[0] <= self._end)

    def _window(self, time: Any) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Slots that make the climatology of a time, and their weights."""
        months, days, minutes = seasons(np.array([time]))
        if self.monthly:
            return (months,), np.ones(1)
        offsets = np.arange(1 - HALF_WINDOW, HALF_WINDOW)
        slot = np.searchsorted(self._minutes, minutes[0])
        return ((days[0] + offsets) % DAYS, np.full(len(offsets), slot)), 1.0 - np.abs(offsets) / HALF_WINDOW

    def _slots(self, time: Any) -> list[tuple[int, ...]]:
        """Where a time of the period counts: twice for the last day of a year of 365 days."""
        months, days, minutes = seasons(np.array([time]))
        if self.monthly:
            return [(int(months[0]),)]
        slot = np.flatnonzero(self._minutes == minutes[0])
        next_day = seasons(as_gregorian(np.array([time])) + np.timedelta64(1, "D"))[1][0]
        last = [DAYS - 1] if days[0] == DAYS - 2 and next_day == 0 else []
        return [(int(day), int(s)) for day in (int(days[0]), *last) for s in slot]

    def _add(self, truth: Truth, index: int) -> None:
        slots = [slot for slot in self._slots(truth.times[index]) if self._needed[slot]]
        if not slots:
            return
        for v, name in enumerate(self.names):
            field = truth.dataset[name][index].values
            held = ~np.isnan(field)
            for slot in slots:
                self._sums[(*slot, v)] += np.where(held, field, 0.0)
                self._counts[(*slot, v)] += held
                self._filled[slot] = True


class FileClimatology:
    """A climatology by ``month`` (from 1), or by ``dayofyear`` (from 1) and ``hour``, as that of WeatherBench 2."""

    def __init__(self, path: str, forecasts: Forecasts) -> None:
        self.file = StoredFile(path)
        self.description = path
        check_same_grid(self.file.grid, forecasts.grid, path, forecasts.path)
        self._axes = {
            axis: self.file.dataset[axis].values
            for axis in ("month", "dayofyear", "hour")
            if axis in self.file.dataset.dims
        }
        if "month" not in self._axes and "dayofyear" not in self._axes:
            held = ", ".join(map(str, self.file.dataset.dims))
            raise DataError(f"{path}: a climatology has a dim month, or dayofyear (and hour); this file has {held}")
        self._variables = {variable.name: self._find(variable) for variable in forecasts.variables}

    def __call__(self, name: str, time: Any) -> np.ndarray:
        """The field for the season of ``time``   [H, W] float32"""
        return self.file.read(self._variables[name], self._indices(time) or {})[0]

    def has(self, time: Any) -> bool:
        return self._indices(time) is not None

    def saw(self, time: Any) -> bool:
        return False  # a file does not say

    def _indices(self, time: Any) -> dict[str, int] | None:
        months, days, minutes = seasons(np.array([time]))
        wanted = {"month": months[0] + 1, "dayofyear": days[0] + 1, "hour": minutes[0] / 60.0}
        found = {axis: np.flatnonzero(values == wanted[axis]) for axis, values in self._axes.items()}
        return {axis: int(at[0]) for axis, at in found.items()} if all(map(len, found.values())) else None

    def _find(self, variable: Stored) -> Stored:
        """The same quantity, whatever it is called; ``DataError`` where there is none, or it has other units."""
        held = {stored.quantity: stored for stored in self.file.variables}
        if variable.quantity not in held:
            names = ", ".join(stored.name for stored in held.values())
            raise DataError(f"{self.file.path}: has no climatology of {variable.name}; it holds {names}")
        found = held[variable.quantity]
        if not same_units(found.units, variable.units):
            raise DataError(
                f"{self.file.path}: {found.name} is in {found.units!r}, in the forecast in {variable.units!r}; convert "
                f"one of them"
            )
        return found


def _check_scratch(cells: int) -> None:
    """``DataError`` where there is no room for sums and counts; a full disk would end the process without a word."""
    folder, needed = tempfile.gettempdir(), 6 * cells
    free = shutil.disk_usage(folder).free
    if needed > 0.95 * free:
        raise DataError(
            f"--climatology: its sums need {needed / 2**30:.1f} GiB in {folder}, which has {free / 2**30:.1f} GiB; "
            f"name another folder in TMPDIR, or give a climatology in a file"
        )


def _scratch(shape: tuple[int, ...], dtype: type) -> np.memmap:
    """Zeros in a file without a name, which vanishes with the process; untouched parts take no space on the disk."""
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=shape)
