"""Initial times as a user writes them, and the times of the forecasts that start there."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from sfno_dist.data import DataError
from sfno_dist.data.calendars import time_text
from sfno_dist.data.recipe import Recipe
from sfno_dist.data.samples import FieldReader
from sfno_dist.data.timeline import MINUTES, TimeStep, in_calendar, period

FIRST, LAST = np.datetime64("1678", "s"), np.datetime64("2262", "s") - 1  # others would wrap around in nanoseconds


def initial_indices(texts: Sequence[str], reader: FieldReader, step: TimeStep) -> list[int]:
    """Indices in the data of the times that ``texts`` name: one, as 2020-01-01T06, or all of a period.

    A period reads FIRST/LAST or FIRST/LAST/EVERY, as 2020-01-01/2020-01-31/24hours, and takes the times that the data
    have in it. ``DataError`` for one that the data lack or declare missing, and for one named twice.
    """
    found: list[int] = []
    for text in texts:
        chosen = _of_period(text, reader) if "/" in text else [find_time(_parsed(text), reader, step)]
        found += [index for index in chosen if index not in found]
    incomplete = [reader.times[index] for index in found if not reader.complete[index]]
    if incomplete:
        raise DataError(f"{reader.source}: values are missing at {_short(incomplete[0])}; start at another time")
    return found


def find_time(time: Any, reader: FieldReader, step: TimeStep) -> int:
    """Index in the data of a time: the same instant, or for steps of months the same month."""
    ordinals = step.ordinals(reader.times)
    time = in_calendar(time, reader.times)
    bounded = time if not isinstance(time, np.datetime64) else min(max(time, FIRST), LAST)
    wanted = step.ordinals(np.array([bounded]))[0]
    found = np.flatnonzero(ordinals == wanted)
    if len(found) == 0:
        places = [0, int(np.argmin(np.abs(ordinals - wanted))), -1]
        first, nearest, last = (_short(at) for at in reader.times[places])
        raise DataError(
            f"{reader.source}: no data at {_short(time)}; the nearest time is {nearest}, the data run from {first} to "
            f"{last}"
        )
    return int(found[0])


def valid_times(start: int, steps: int, reader: FieldReader, step: TimeStep) -> np.ndarray:
    """The times 0 to ``steps`` steps after that of the data at ``start``   [steps + 1]

    Where the data have such a month, they say at what day and hour it is stamped.
    """
    at = reader.times[start]
    minutes = steps * step.stride * (MINUTES["days"] * 30 if step.unit == "months" else 1)
    if isinstance(at, np.datetime64) and minutes > (LAST - at.astype("datetime64[s]")) // np.timedelta64(1, "m"):
        raise DataError(f"--steps {steps}: a forecast from {_short(at)} ends by 2261, as the times of files do")
    times = [step.advance(at, n) for n in range(steps + 1)]
    held = dict(zip(step.ordinals(reader.times).tolist(), reader.times, strict=True))
    ordinals = step.ordinals(np.array(times)).tolist()
    return np.array([held.get(ordinal, time) for ordinal, time in zip(ordinals, times, strict=True)])


def check_prescribed(times: np.ndarray, reader: FieldReader, recipe: Recipe) -> None:
    """``DataError`` where the data lack a time at which the model takes variables from them: all but the last."""
    if not recipe.roles.prescribed:
        return
    needed = times[:-1]
    lacking = ~np.isin(recipe.step.ordinals(needed), recipe.step.ordinals(reader.times))
    for time in needed[lacking][:1]:
        try:
            find_time(time, reader, recipe.step)
        except DataError as error:
            names = ", ".join(recipe.roles.prescribed)
            raise DataError(f"{error}; the model takes {names} from the data at every step") from error


def _parsed(text: str) -> np.datetime64:
    with contextlib.suppress(ValueError):
        time = np.datetime64(text.removesuffix("Z"), "s")
        if not np.isnat(time):
            return time
    raise DataError(f"--init: a time reads like 1991-01 or 2020-01-01T06, got {text!r}")


def _of_period(text: str, reader: FieldReader) -> list[int]:
    first, last, *every = text.split("/")
    if len(every) > 1:
        raise DataError(f"--init: a period reads FIRST/LAST or FIRST/LAST/EVERY, got {text!r}")
    for date in (first, last):
        if not FIRST <= _parsed(date) <= LAST:
            raise DataError(f"--init {text}: years run from 1678 to 2261")
    start, end = period(first, last, f"--init {text}")
    inside = np.flatnonzero((reader.dates >= start) & (reader.dates <= end) & reader.complete)
    if len(inside) == 0:
        raise DataError(f"{reader.source}: no data from {first} to {last}; they run from {_short(reader.times[0])} to "
                        f"{_short(reader.times[-1])}")  # fmt: skip
    if not every:
        return inside.tolist()
    stride = TimeStep.parse(every[0])
    ordinals = stride.ordinals(reader.times[inside])
    chosen = (ordinals - ordinals[0]) % stride.stride == 0
    chosen &= np.diff(ordinals, prepend=ordinals[0] - 1) != 0  # the first of a month, where the step is months
    return inside[chosen].tolist()


def _short(time: Any) -> str:
    return time_text(time)[:16]
