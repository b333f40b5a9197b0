"""The truth at the times of forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from sfno_dist.data import DataError, open_dataset
from sfno_dist.data.calendars import calendar_of, time_text
from sfno_dist.data.timeline import TimeStep, in_calendar
from sfno_dist.data.units import same_units
from sfno_dist.geometry import Grid
from sfno_dist.scores.forecasts import Forecasts
from sfno_dist.scores.stored import check_same_grid


class Truth:
    """Fields of ``paths`` that forecasts are held to; missing values are NaN.

    Raises ``DataError`` for another grid, other units, or variables that it lacks.
    """

    def __init__(self, paths: Sequence[str], forecasts: Forecasts) -> None:
        names = [variable.name for variable in forecasts.variables]
        self.path = ", ".join(paths)
        self.dataset = open_dataset(paths, names, missing=names)
        self.times = self.dataset.time.values
        self.grid = Grid.from_coordinates(self.dataset.lat.values, self.dataset.lon.values)
        check_same_grid(forecasts.grid, self.grid, forecasts.path, self.path)
        for variable in forecasts.variables:
            units = str(self.dataset[variable.name].attrs.get("units", ""))
            if not same_units(units, variable.units):
                raise DataError(
                    f"{forecasts.path}: {variable.name} is in {variable.units!r}, in {self.path} in {units!r}; convert "
                    f"one of them"
                )

    @cached_property
    def unit(self) -> TimeStep:
        """What times are counted in: months where the truth has one time a month, else hours."""
        try:
            monthly = TimeStep.of(self.times).unit == "months"
        except DataError:  # a single time, or no whole hours between them
            monthly = False
        return TimeStep(1, "months" if monthly else "hours")

    def ordinals(self, times: Sequence[Any]) -> np.ndarray:
        """Times of forecasts counted as those of the truth are: months, or minutes   [n] int64"""
        mine = [in_calendar(time, self.times) for time in times]
        array = np.array(mine, dtype=object if self.times.dtype == object else None)
        if array.dtype != self.times.dtype or calendar_of(array) != calendar_of(self.times):
            raise DataError(
                f"{self.path}: counts in the {calendar_of(self.times)} calendar, the forecasts in "
                f"{calendar_of(np.array(times, dtype=object))}; give files of one calendar"
            )
        return self.unit.ordinals(array)

    @cached_property
    def _held(self) -> dict[int, int]:
        return dict(zip(self.unit.ordinals(self.times).tolist(), range(len(self.times)), strict=True))

    def has(self, ordinals: np.ndarray) -> np.ndarray:
        """Which times there are fields at   [n] bool"""
        return np.isin(ordinals, list(self._held))

    def read(self, variable: str, ordinal: int) -> np.ndarray:
        """[H, W] float32"""
        return self.dataset[variable][self._held[int(ordinal)]].values

    @property
    def extent(self) -> str:
        """Words for its first and last time."""
        return f"{time_text(self.times[0])[:16]} to {time_text(self.times[-1])[:16]}"
