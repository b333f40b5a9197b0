"""Forecast files: which initial and lead times they hold, and the fields at each.

One initial time or many, in one file or many; dims (time, lat, lon) with ``lead_time`` and ``init_time`` beside, as
``sfno-dist forecast`` writes them, or (time, prediction_timedelta, ...) as WeatherBench 2 does, with or without members
and pressure levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from sfno_dist.data import DataError
from sfno_dist.data.calendars import time_text
from sfno_dist.data.checks import files
from sfno_dist.data.units import same_units
from sfno_dist.geometry import Grid
from sfno_dist.scores.stored import Stored, StoredFile, check_same_grid


@dataclass(frozen=True)
class Place:
    """Where the fields of one initial time and lead lie; times are datetime64[ns] or cftime dates."""

    init: Any
    valid: Any
    file: int
    indices: tuple[tuple[str, int], ...]


class Forecasts:
    """The forecasts of ``paths`` (files, zarr folders, globs), in order of initial time, then of valid time.

    ``variables`` chooses among those that every file holds; by default all. ``DataError`` for files that differ in
    grid, variables, units or number of members, and for one initial and valid time that two of them hold.
    """

    def __init__(self, paths: str | Sequence[str], variables: Sequence[str] | None = None) -> None:
        self.files = [StoredFile(path) for path in files(paths)]
        self.path = self.files[0].path
        for other in self.files[1:]:
            check_same_grid(other.grid, self.grid, other.path, self.path)
        self._held = [{variable.name: variable for variable in file.variables} for file in self.files]
        self.variables = self._chosen(list(variables or self._held[0]))
        self.places = [place for number, file in enumerate(self.files) for place in _places(file, number)]
        self.places.sort(key=lambda place: (place.init, place.valid))
        for a, b in zip(self.places, self.places[1:], strict=False):
            if (a.init, a.valid) == (b.init, b.valid):
                raise DataError(
                    f"{self.files[b.file].path}: the forecast from {time_text(b.init)[:16]} for "
                    f"{time_text(b.valid)[:16]} is also in {self.files[a.file].path}; name it once"
                )

    @property
    def grid(self) -> Grid:
        return self.files[0].grid

    @cached_property
    def members(self) -> int:
        """1 where the forecasts are no ensemble."""
        counts = [file.dataset.sizes.get(str(file.dim("member")), 1) for file in self.files]
        if len(set(counts)) > 1:
            other = next(n for n, count in enumerate(counts) if count != counts[0])
            raise DataError(
                f"{self.files[other].path}: has {counts[other]} members, {self.path} has {counts[0]}; score them apart"
            )
        return counts[0]

    def read(self, place: Place, variable: str) -> np.ndarray:
        """[M, H, W] float32; ``DataError`` where it has no value or is infinite, as a model's that blew up.

        At the initial time itself a forecast may lack values: there are no sums over a step yet.
        """
        fields = self.files[place.file].read(self._held[place.file][variable], dict(place.indices))
        kind = "infinite" if np.isinf(fields).any() else "nowhere a number" if np.isnan(fields).all() else None
        if kind == "infinite" or (kind and place.valid != place.init):
            raise DataError(
                f"{self.files[place.file].path}: {variable} is {kind} in the forecast from "
                f"{time_text(place.init)[:16]} for {time_text(place.valid)[:16]}; leave it out with --variables"
            )
        return fields

    def _chosen(self, names: list[str]) -> list[Stored]:
        for file, held in zip(self.files, self._held, strict=True):
            for name in names:
                if name not in held:
                    raise DataError(f"{file.path}: has no forecast of {name}; it holds {', '.join(held)}")
                if not same_units(held[name].units, self._held[0][name].units):
                    raise DataError(
                        f"{file.path}: {name} is in {held[name].units!r}, in {self.path} in "
                        f"{self._held[0][name].units!r}; convert one of them"
                    )
        return [self._held[0][name] for name in names]


def _places(file: StoredFile, number: int) -> list[Place]:
    """All initial and lead times of a file, from two of initial, lead and valid time."""
    names = {axis: file.find(axis) for axis in ("init_time", "lead_time", "valid_time")}
    if names["init_time"] is None and file.dim("lead_time") and "time" in file.dataset.dims:
        names |= {"init_time": "time", "valid_time": None}  # as WeatherBench 2 writes them
    held = {axis: _decoded(file, axis, name) for axis, name in names.items() if name is not None}
    if len(held) < 2:
        raise DataError(
            f"{file.path}: a forecast needs two of init_time, lead_time and time (the valid time), has "
            f"{', '.join(filter(None, names.values())) or 'none'}"
        )
    times = dict(zip(held, xr.broadcast(*held.values()), strict=True))
    dims = tuple(map(str, next(iter(times.values())).dims))
    places = []
    for at in np.ndindex(next(iter(times.values())).shape):
        init, lead, valid = (times[axis].values[at] if axis in times else None for axis in names)
        init = _time(valid - _duration(lead, valid) if init is None else init)
        valid = _time(init + _duration(lead, init) if valid is None else valid)
        places.append(Place(init, valid, number, tuple(zip(dims, at, strict=True))))
    return places


def _decoded(file: StoredFile, axis: str, name: str) -> xr.DataArray:
    """Times or durations of a file; ``DataError`` where they are bare numbers."""
    array = file.dataset[name]
    if name in file.dataset.variables:
        array = xr.decode_cf(file.dataset[[name]], decode_timedelta=True)[name]
    if array.dtype.kind not in ("m" if axis == "lead_time" else "MO"):
        units = "hours" if axis == "lead_time" else "hours since 1970-01-01"
        raise DataError(f"{file.path}: {name} holds bare numbers; give it units as CF has them, such as {units!r}")
    return array


def _duration(lead: Any, time: Any) -> Any:
    """A timedelta64 in what can be added to ``time``, a datetime64 or a cftime date."""
    return lead if isinstance(time, np.datetime64) else timedelta(microseconds=int(lead / np.timedelta64(1, "us")))


def _time(value: Any) -> Any:
    return value.astype("datetime64[ns]") if isinstance(value, np.datetime64) else value
