"""Times of files, and arithmetic on them in any calendar of the CF conventions.

Times of the Gregorian calendar are datetime64[ns]. Times of a model's own calendar (noleap, 360_day, julian), which
datetime64 cannot hold, and years beyond its range are cftime dates, so that no date is moved and no step is lost.
"""

from __future__ import annotations

import re
import warnings

import cftime
import netCDF4
import numpy as np
import xarray as xr

from sfno_dist.data.errors import DataError

GREGORIAN = ("standard", "gregorian", "proleptic_gregorian")
ISO_8601 = re.compile(r"\d{4}-\d\d(-\d\d([T ]\d\d(:\d\d(:\d\d(\.\d+)?)?)?)?)?Z?")
EPOCH = "microseconds since 1970-01-01"
# Whole multiples of these are what times are rounded to, the finest that rounding errors of the file leave apart.
ROUND_TO_SECONDS = (1, 60, 600, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400)


def calendar_of(times: np.ndarray) -> str:
    """CF name of the calendar of times [n]."""
    return times[0].calendar if times.dtype == object and times.size else "proleptic_gregorian"


def instants(times: np.ndarray) -> np.ndarray:
    """Microseconds since 1970 in the calendar of the times: differences are true durations   [n] int64"""
    if times.dtype != object:
        return times.astype("datetime64[us]").astype(np.int64)
    return np.asarray(cftime.date2num(times, EPOCH, calendar=calendar_of(times)), dtype=np.int64)


def time_text(time: np.datetime64 | cftime.datetime) -> str:
    """ISO 8601 to the second, with the calendar where it is not the Gregorian one."""
    if isinstance(time, np.datetime64):
        return str(np.datetime_as_string(time, "s"))
    return time.isoformat(timespec="seconds") + ("" if time.calendar in GREGORIAN else f" ({time.calendar})")


def as_gregorian(times: np.ndarray) -> np.ndarray:
    """The Gregorian instants of the same season and hour, for the sun, the seasons and periods   [n] datetime64[ns]

    Year, month and hour stay; a day is moved where its month has another length (30 February becomes the 28th). Not for
    differences between times, which ``instants`` gives.
    """
    if times.dtype != object:
        return times.astype("datetime64[ns]")
    return np.array([_gregorian(time) for time in times], dtype="datetime64[ns]")


def _gregorian(time: cftime.datetime) -> np.datetime64:
    month = np.datetime64(f"{time.year:04d}-{time.month:02d}", "M")
    length = int(((month + 1).astype("datetime64[D]") - month.astype("datetime64[D]")).astype(int))
    own_length = time.daysinmonth
    day = time.day if time.day <= length == own_length else (time.day - 1) * length // own_length + 1
    into_day = ((time.hour * 60 + time.minute) * 60 + time.second) * 10**6 + time.microsecond
    whole_days = (month.astype("datetime64[D]") + (day - 1)).astype("datetime64[us]")
    return (whole_days + np.timedelta64(into_day, "us")).astype("datetime64[ns]")


def decode_times(values: np.ndarray, attributes: dict, what: str) -> np.ndarray:
    """datetime64[ns] or cftime dates of a time axis, rounded where its numbers are too coarse for its steps   [n]

    ``what`` names file and axis in the ``DataError`` of one that cannot be decoded.
    """
    if np.issubdtype(values.dtype, np.datetime64):
        return _checked(values, what)
    units, calendar = str(attributes.get("units", "none")), str(attributes.get("calendar", "standard")).lower()
    remedy = "write it as 'hours since ...'"
    if values.dtype.kind in "SUOT":
        return _from_text(values, what, remedy)
    units = re.sub(r"\s+since\s+", " since ", units, flags=re.IGNORECASE)
    if " since " not in units or values.dtype.kind not in "iuf":
        raise DataError(f"{what} with units {units!r} is no time that can be decoded; {remedy}")
    never_written = values == netCDF4.default_fillvals.get(values.dtype.str[1:], np.nan)
    missing = np.flatnonzero(~np.isfinite(values.astype(np.float64)) | never_written)
    if missing.size:
        raise DataError(f"{what}: time number {missing[0]} is missing; remove it or mend the file")
    try:
        times = _decoded(values, units, calendar)
    except (ValueError, OverflowError, TypeError, AttributeError) as error:
        raise DataError(
            f"{what} with units {units!r} (calendar {calendar}) cannot be decoded; {remedy} and, for months, a date "
            f"for each"
        ) from error
    # Half of the distance between neighbouring numbers of the type that the file stores, in seconds.
    slack = 0.5 * float(np.spacing(np.abs(values).max())) * _seconds(units) if values.dtype.kind == "f" else 0.0
    return _rounded(_checked(times, what), max(slack, 0.4), what)


def _from_text(values: np.ndarray, what: str, remedy: str) -> np.ndarray:
    """Dates written out, such as 2019-12-30T06:00:00Z   [n] datetime64[ns]"""
    texts = [(x.decode("ascii", "replace") if isinstance(x, bytes) else str(x)).strip("\0 ") for x in values.ravel()]
    wrong = next((x for x in texts if not ISO_8601.fullmatch(x)), None)
    try:
        if wrong is None:
            return _checked(np.array([x.removesuffix("Z") for x in texts], dtype="datetime64[ns]"), what)
    except ValueError:  # such as 2019-13-01
        wrong = texts[0]
    raise DataError(f"{what} holds text such as {wrong!r}, which is no date like 2019-12-30T06:00:00; {remedy}")


def _decoded(values: np.ndarray, units: str, calendar: str) -> np.ndarray:
    numbers = values.astype(np.float64) if values.dtype.kind == "f" else values
    axis = xr.Variable("n", numbers, {"units": units, "calendar": calendar})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of years that need cftime dates
        times = xr.decode_cf(xr.Dataset({"axis": axis})).axis.values
    if times.dtype == object or not np.issubdtype(times.dtype, np.datetime64):
        return np.asarray(times, dtype=object)
    years = times.astype("datetime64[Y]").astype(np.int64) + 1970
    if years.size and not 1678 <= years.min() <= years.max() <= 2261:  # beyond nanoseconds in 64 bits
        return np.asarray(cftime.num2date(numbers, units, calendar, only_use_cftime_datetimes=True), dtype=object)
    return times


def _seconds(units: str) -> float:
    """Seconds in a unit such as that of "days since 1900-01-01"."""
    unit = units.split()[0].lower()
    if unit.startswith(("month", "common_year", "year")):
        return 30 * 86400.0
    starts = {"mic": 1e-6, "us": 1e-6, "mil": 1e-3, "ms": 1e-3, "n": 1e-9, "s": 1.0, "m": 60.0, "h": 3600.0}
    return next((seconds for start, seconds in starts.items() if unit.startswith(start)), 86400.0)


def _checked(times: np.ndarray, what: str) -> np.ndarray:
    if times.dtype == object:
        return times
    missing = np.flatnonzero(np.isnat(times))
    if missing.size:
        raise DataError(f"{what}: time number {missing[0]} is missing; remove it or mend the file")
    return times.astype("datetime64[ns]")


def _rounded(times: np.ndarray, slack: float, what: str) -> np.ndarray:
    """Times moved by at most ``slack`` seconds to the whole multiples of a unit that all lie near."""
    if times.size == 0:
        return times
    exact = instants(times)
    for seconds in ROUND_TO_SECONDS:
        unit = seconds * 10**6
        nearest = (exact + unit // 2) // unit * unit
        if seconds > 2.0 * slack and np.abs(nearest - exact).max() <= slack * 1e6 * (1 + 1e-6) + 1:
            if times.dtype != object:
                return nearest.astype("datetime64[us]").astype("datetime64[ns]")
            moved = cftime.num2date(nearest, EPOCH, calendar_of(times), only_use_cftime_datetimes=True)
            return np.asarray(moved, dtype=object)
    if slack > 30.0:
        raise DataError(
            f"{what}: its numbers are too coarse to tell times (within {slack:g} s); store them as integers or float64"
        )
    return times
