"""``Plan``: which forecast fields are scored against what, and what is absent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sfno_dist.data import DataError
from sfno_dist.data.accumulated import accumulation_hours
from sfno_dist.data.calendars import instants, time_text
from sfno_dist.scores.forecasts import Forecasts, Place
from sfno_dist.scores.truth import Truth

SHORTEST_MONTH = 27 * 86_400_000_000  # microseconds; of monthly means that are stamped in mid-month


class Climatology(Protocol):
    """A field [H, W] for a variable and the season of a time, where it ``has`` one; ``saw`` what it was made of."""

    description: str

    def __call__(self, name: str, time: Any) -> np.ndarray: ...

    def has(self, time: Any) -> bool: ...

    def saw(self, time: Any) -> bool: ...


@dataclass(frozen=True)
class Sample:
    """A forecast field to score, with the ordinals of its times and the index of its lead."""

    place: Place
    init: int
    valid: int
    lead: int


@dataclass(frozen=True)
class Plan:
    """Samples in order of initial time, the lead times [L] in minutes or months, and notes on what is absent."""

    samples: list[Sample]
    leads: np.ndarray
    persistence: bool
    climatology: Climatology | None
    notes: list[str]

    @property
    def kinds(self) -> list[str]:
        """The forecast and the baselines that can be had."""
        return ["forecast", *["persistence"] * self.persistence, *["climatology"] * (self.climatology is not None)]

    @property
    def map_leads(self) -> list[int]:
        """Indices of the first lead time beyond 0, the middle and the last."""
        later = np.flatnonzero(self.leads > 0) if (self.leads > 0).any() else np.arange(len(self.leads))
        return sorted({int(later[0]), int(later[(len(later) - 1) // 2]), int(later[-1])})


def plan(forecasts: Forecasts, truth: Truth, climatology: Climatology | None) -> Plan:
    """``DataError`` where the truth has none of the times, or other steps or sums than the forecasts."""
    _check_steps(forecasts, truth)
    inits = truth.ordinals([place.init for place in forecasts.places])
    valids = truth.ordinals([place.valid for place in forecasts.places])
    held = truth.has(valids)
    if not held.any():
        first, last = (time_text(place.valid)[:16] for place in (forecasts.places[0], forecasts.places[-1]))
        raise DataError(
            f"{truth.path}: has none of the times of {forecasts.path}, {first} to {last}; it runs {truth.extent}"
        )
    leads = np.unique((valids - inits)[held])
    samples = [
        Sample(forecasts.places[n], int(inits[n]), int(valids[n]), int(np.searchsorted(leads, valids[n] - inits[n])))
        for n in np.flatnonzero(held)
    ]
    notes = []
    if not held.all():
        notes.append(f"{int((~held).sum())} of {len(held)} forecast fields are not scored: the truth lacks their times")
    without = [sample.place.init for sample in samples if not truth.has(np.array([sample.init]))[0]]
    if without:
        notes.append(f"no persistence: the truth lacks initial times, such as {time_text(without[0])[:16]}")
    climatology, more = _usable(climatology, samples)
    notes += more
    if forecasts.members == 1:
        notes.append("no spread: the forecast is a single one, and its CRPS is its MAE")
    return Plan(samples, leads, not without, climatology, notes)


def _usable(climatology: Climatology | None, samples: list[Sample]) -> tuple[Climatology | None, list[str]]:
    """The climatology where it has every season that is scored, and notes."""
    if climatology is None:
        return None, ["no climatology, and so no ACC: name a period of the truth or a file with --climatology"]
    times = [sample.place.valid for sample in samples]
    lacking = [time for time in times if not climatology.has(time)]
    if lacking:
        reason = f"{climatology.description} has none for {time_text(lacking[0])[:10]}"
        return None, [f"no climatology, and so no ACC: {reason}"]
    if any(map(climatology.saw, times)):
        return climatology, ["the climatology was made of times that are scored here, and is the better for it"]
    return climatology, []


def _check_steps(forecasts: Forecasts, truth: Truth) -> None:
    """Monthly truth tells nothing of single days, and the sum over an hour nothing of that over six."""
    first = forecasts.places[0].init
    times = [first, *(place.valid for place in forecasts.places if place.init == first and place.valid != first)]
    array = np.array(times, dtype=None if isinstance(first, np.datetime64) else object)
    if truth.unit.unit == "months":
        if len(times) > 1 and np.diff(instants(array)).min() < SHORTEST_MONTH:
            raise DataError(
                f"{truth.path}: has one time a month, {forecasts.path} has shorter steps; give truth at their times"
            )
        return
    for variable in forecasts.variables:
        hours = truth.dataset[variable.name].attrs.get("accumulation_hours")
        attributes = forecasts.files[0].dataset[variable.name_in_file].attrs
        own = accumulation_hours(variable.name_in_file, attributes, array)
        if hours is not None and own is not None and abs(own - hours) > 0.01 * hours:
            raise DataError(
                f"{truth.path}: {variable.name} is summed over {hours:g} h, in {forecasts.path} over {own:g} h; sum "
                f"the truth over {own:g} h first, or leave it out with --variables"
            )
