"""Steps along the time axis: which samples are exactly one step apart, and what time comes next."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import cftime
import numpy as np

from sfno_dist.data.calendars import calendar_of, instants
from sfno_dist.data.errors import DataError

MINUTES = {"hours": 60, "days": 24 * 60}


@dataclass(frozen=True)
class TimeStep:
    """A step of ``count`` hours, days or calendar months, such as ``TimeStep.parse("6 hours")``."""

    count: int
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in (*MINUTES, "months") or self.count < 1:
            raise DataError(f"a time step is a positive number of hours, days or months, got {self.count} {self.unit}")

    @classmethod
    def parse(cls, text: str) -> TimeStep:
        found = re.fullmatch(r"\s*(\d+)\s*(hour|day|month)s?\s*", text)
        if not found:
            raise DataError(f"a time step reads like '6 hours', '1 day' or '1 month', got {text!r}")
        return cls(int(found[1]), found[2] + "s")

    @classmethod
    def of(cls, times: np.ndarray) -> TimeStep:
        """The spacing that most neighbouring times have; ``DataError`` where there is none in whole hours."""
        if len(times) < 2:
            raise DataError("a step between times needs at least 2 of them; name one with data.step")
        months = np.diff(cls(1, "months").ordinals(times))
        minutes = np.diff(cls(1, "hours").ordinals(times))
        # Months are told by times that come once in each, at least 27 days apart.
        if np.all(months >= 1) and np.all(minutes >= 27 * MINUTES["days"]):
            return cls(int(np.bincount(months).argmax()), "months")
        spacings, counts = np.unique(minutes, return_counts=True)
        spacing = int(spacings[counts.argmax()])
        if spacing % MINUTES["hours"]:
            raise DataError(
                f"most times lie {spacing} minutes apart, no whole number of hours; name a step with data.step"
            )
        unit = "days" if spacing % MINUTES["days"] == 0 else "hours"
        return cls(spacing // MINUTES[unit], unit)

    def __str__(self) -> str:
        return f"{self.count} {self.unit if self.count > 1 else self.unit[:-1]}"

    def ordinals(self, times: np.ndarray) -> np.ndarray:
        """Whole months, or minutes, since 1970 in the times' calendar: equal times have equal ordinals   [n] int64"""
        times = np.asarray(times)
        if times.dtype == object:  # cftime dates
            if self.unit == "months":
                return np.array([12 * (time.year - 1970) + time.month - 1 for time in times], dtype=np.int64)
            return (instants(times) + 30 * 10**6) // (60 * 10**6)
        unit = "M" if self.unit == "months" else "m"
        half = np.timedelta64(0, "s") if unit == "M" else np.timedelta64(30, "s")
        return (np.asarray(times, dtype="datetime64[ns]") + half).astype(f"datetime64[{unit}]").astype(np.int64)

    @property
    def stride(self) -> int:
        """The step in units of ``ordinals``."""
        return self.count * MINUTES.get(self.unit, 1)

    def advance(self, time: Any, steps: int) -> Any:
        """The time ``steps`` later; months keep the day and hour, or end with a shorter month.

        ``time`` is a datetime64 or, in the calendar of a model, a cftime date.
        """
        if not isinstance(time, np.datetime64):
            return self._advance_date(time, steps)
        time = time.astype("datetime64[ns]")
        if self.unit != "months":
            return time + np.timedelta64(self.stride * steps, "m").astype("timedelta64[ns]")
        month = time.astype("datetime64[M]") + steps * self.count
        into_month = time - time.astype("datetime64[M]").astype("datetime64[ns]")
        last_day = (month + 1).astype("datetime64[D]") - np.timedelta64(1, "D")
        first_day = month.astype("datetime64[D]")
        day = min(first_day + into_month.astype("timedelta64[D]"), last_day)
        return day.astype("datetime64[ns]") + into_month % np.timedelta64(1, "D").astype("timedelta64[ns]")

    def _advance_date(self, time: cftime.datetime, steps: int) -> cftime.datetime:
        if self.unit != "months":
            return time + timedelta(minutes=self.stride * steps)
        year, month = divmod(12 * time.year + time.month - 1 + steps * self.count, 12)
        first = time.replace(year=year, month=month + 1, day=1)
        return first.replace(day=min(time.day, first.daysinmonth))


def in_calendar(time: Any, times: np.ndarray) -> Any:
    """A date as given, datetime64, in the calendar of ``times``: itself or a cftime date."""
    if times.dtype != object or not isinstance(time, np.datetime64):
        return time
    text = str(time.astype("datetime64[s]"))
    year, month, day, hour, minute, second = (int(part) for part in re.split("[-T:]", text))
    return cftime.datetime(year, month, day, hour, minute, second, calendar=calendar_of(times))


def sequences(times: np.ndarray, step: TimeStep, steps: int) -> np.ndarray:
    """Indices of all runs of ``steps`` + 1 times that lie exactly one step apart   [n, steps + 1] int64

    A gap in the times ends a run; it never makes a pair of the times on its two sides.
    """
    ordinals = step.ordinals(times)
    order = np.argsort(ordinals, kind="stable")
    rising = ordinals[order]
    if np.any(np.diff(rising) == 0):
        raise DataError(f"the times are closer together than the minute or month that a step of {step} tells apart")
    # wanted[i, n]: where time i + n steps would lie among the times   [times, steps + 1]
    wanted = ordinals[:, None] + step.stride * np.arange(steps + 1)
    found = np.minimum(np.searchsorted(rising, wanted), len(rising) - 1)
    complete = (rising[found] == wanted).all(axis=1) if len(rising) else np.zeros(0, bool)
    return order[found[complete]].astype(np.int64).reshape(-1, steps + 1)


def period(first_date: str, last_date: str, what: str) -> tuple[np.datetime64, np.datetime64]:
    """First and last instant of a period written like ("1982", "1989-12"): the last month or day counts whole."""
    try:
        first, last = np.datetime64(str(first_date)), np.datetime64(str(last_date))
    except ValueError:
        raise DataError(
            f"{what}: dates read like 1989, 1989-12 or 1989-12-31T18, got {first_date!r} to {last_date!r}"
        ) from None
    end = (last + 1).astype("datetime64[ns]") - np.timedelta64(1, "ns")
    if first.astype("datetime64[ns]") > end:
        raise DataError(f"{what}: the period {first_date} to {last_date} ends before it begins")
    return first.astype("datetime64[ns]"), end
