"""``verify``: the scores of forecasts over all initial times, beside persistence and climatology.

One field of one variable is in memory at a time (with its members), however many initial and lead times there are.

Dims: V variables, L lead times, R regions, K wavenumbers, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xarray as xr
from tqdm import tqdm

from sfno_dist.data import DataError
from sfno_dist.data.calendars import time_text
from sfno_dist.scores import definitions
from sfno_dist.scores.definitions import REGIONS, SCORES
from sfno_dist.scores.forecasts import Forecasts, Place
from sfno_dist.scores.truth import Truth


class Climatology(Protocol):
    """A field [H, W] for a variable and the season of a time, where it ``has`` one."""

    description: str

    def __call__(self, name: str, time: object) -> np.ndarray: ...

    def has(self, time: object) -> bool: ...


class Means:
    """Means over times, NaN counting for nothing, of named arrays that are filled in place by place."""

    def __init__(self, *shape: int) -> None:
        self._shape = shape
        self._sums: dict[str, np.ndarray] = {}
        self._counts: dict[str, np.ndarray] = {}

    def add(self, values: dict[str, np.ndarray], place: tuple[int, ...]) -> None:
        for name, value in values.items():
            if name not in self._sums:
                whole = (*self._shape, *value.shape)
                self._sums[name], self._counts[name] = np.zeros(whole), np.zeros(whole, np.int32)
            held = ~np.isnan(value)
            self._sums[name][place] += np.where(held, value, 0.0)
            self._counts[name][place] += held

    def means(self) -> dict[str, np.ndarray]:
        return {
            name: np.divide(sums, counts := self._counts[name], out=np.full(sums.shape, np.nan), where=counts > 0)
            for name, sums in self._sums.items()
        }


@dataclass(frozen=True)
class Sample:
    """A forecast field to score, with the ordinals of its times and the index of its lead."""

    place: Place
    init: int
    valid: int
    lead: int


@dataclass(frozen=True)
class Plan:
    """What is scored: samples in order of initial time, the lead times [L], and notes on what is absent."""

    samples: list[Sample]
    leads: np.ndarray
    persistence: bool
    climatology: Climatology | None
    notes: list[str]


def plan(forecasts: Forecasts, truth: Truth, climatology: Climatology | None) -> Plan:
    """``DataError`` where the truth has none of the times."""
    inits = truth.ordinals([place.init for place in forecasts.places])
    valids = truth.ordinals([place.valid for place in forecasts.places])
    held = truth.has(valids)
    if not held.any():
        first, last = (time_text(place.valid)[:16] for place in (forecasts.places[0], forecasts.places[-1]))
        raise DataError(
            f"{truth.path}: has none of the times of {forecasts.path}, {first} to {last}; it runs {truth.extent}"
        )
    notes = []
    if not held.all():
        notes.append(f"{int((~held).sum())} of {len(held)} forecast fields are not scored: the truth lacks their times")
    leads = np.unique((valids - inits)[held])
    samples = [
        Sample(forecasts.places[n], int(inits[n]), int(valids[n]), int(np.searchsorted(leads, valids[n] - inits[n])))
        for n in np.flatnonzero(held)
    ]
    without = sorted({sample.place.init for sample in samples if not truth.has(np.array([sample.init]))[0]})
    if without:
        notes.append(f"no persistence: the truth lacks initial times, such as {time_text(without[0])[:16]}")
    if climatology is None:
        notes.append("no climatology, and so no ACC: name a period of the truth or a file with --climatology")
    else:
        seasons = [sample.place.valid for sample in samples if not climatology.has(sample.place.valid)]
        if seasons:
            notes.append(
                f"no climatology, and so no ACC: {climatology.description} has none for {time_text(seasons[0])[:10]}"
            )
            climatology = None
    if forecasts.members == 1:
        notes.append("no spread: the forecast is a single one, and its CRPS is its MAE")
    return Plan(samples, leads, not without, climatology, notes)


def verify(forecasts: Forecasts, truth: Truth, climatology: Climatology | None = None) -> xr.Dataset:
    """Scores on (forecast, variable, lead_time, region), spectra by wavenumber, and maps of bias and RMSE.

    ``forecast`` is "forecast" and, where they can be had, "persistence" (the truth at the initial time) and
    "climatology". ``lead_time`` is in hours, or in months where the truth has one time a month. Maps are of the first,
    middle and last lead time. ``attrs["notes"]`` says what is absent and why. Raises ``DataError`` where the truth has
    none of the forecast's times, and for fields without values.
    """
    chosen = plan(forecasts, truth, climatology)
    names = [variable.name for variable in forecasts.variables]
    kinds = ["forecast", *["persistence"] * chosen.persistence, *["climatology"] * (chosen.climatology is not None)]
    weights = definitions.region_weights(truth.grid)
    scores = Means(len(kinds), len(names), len(chosen.leads))
    spectra = Means(2, len(names), len(chosen.leads))
    map_leads = _map_leads(chosen.leads)
    maps = Means(len(names), len(map_leads))
    for sample in tqdm(chosen.samples, desc="scores", unit="field", leave=False):
        for v, name in enumerate(names):
            place = (v, sample.lead)
            observed = truth.read(name, sample.valid)
            members = forecasts.read(sample.place, name)
            usual = chosen.climatology(name, sample.place.valid) if chosen.climatology else None
            fields = {"forecast": members.mean(0, dtype=np.float64), "climatology": usual}
            if chosen.persistence:
                fields["persistence"] = truth.read(name, sample.init)
            for k, kind in enumerate(kinds):
                found = definitions.error_scores(fields[kind], observed, weights, usual)
                found["crps"] = found["mae"]  # of a forecast without spread
                if kind == "forecast" and len(members) > 1:
                    found |= definitions.ensemble_scores(members, observed, weights)
                scores.add(found, (k, *place))
            for s, field in enumerate((members, observed[None])):
                power = definitions.zonal_spectrum(field, truth.grid, weights)
                spectra.add({"power": power.mean(0)}, (s, *place))
            if sample.lead in map_leads:
                error = fields["forecast"] - observed
                maps.add({"bias": error, "mse": error**2}, (v, map_leads.index(sample.lead)))
    result = _dataset(forecasts, truth, chosen, kinds, definitions.finished(scores.means()))
    result["power"] = (("source", "variable", "lead_time", "region", "wavenumber"), spectra.means()["power"])
    result["power"].attrs = {"long_name": "zonal power", "units": "units of the variable squared, times m"}
    on_map = ("variable", "map_lead_time", "lat", "lon")
    result["bias_map"] = (on_map, maps.means()["bias"].astype(np.float32), {"long_name": SCORES["bias"][0]})
    result["rmse_map"] = (on_map, np.sqrt(maps.means()["mse"]).astype(np.float32), {"long_name": SCORES["rmse"][0]})
    result = result.assign_coords(source=["forecast", "truth"], map_lead_time=result.lead_time.values[map_leads])
    result.attrs["notes"] = "\n".join(chosen.notes + _losses(result))
    return result


def _map_leads(leads: np.ndarray) -> list[int]:
    """Indices of the first lead time beyond 0, the middle and the last."""
    later = np.flatnonzero(leads > 0) if (leads > 0).any() else np.arange(len(leads))
    return sorted({int(later[0]), int(later[(len(later) - 1) // 2]), int(later[-1])})


def _dataset(
    forecasts: Forecasts, truth: Truth, chosen: Plan, kinds: Sequence[str], scores: dict[str, np.ndarray]
) -> xr.Dataset:
    monthly = truth.unit.unit == "months"
    leads = chosen.leads if monthly else chosen.leads / 60.0
    coordinates = {
        "forecast": list(kinds),
        "variable": [variable.name for variable in forecasts.variables],
        "lead_time": ("lead_time", leads, {"long_name": "lead time", "units": "months" if monthly else "hours"}),
        "region": list(REGIONS),
        "units": ("variable", [variable.units for variable in forecasts.variables]),
        "level": ("variable", [_level(variable.quantity[1]) for variable in forecasts.variables], {"units": "hPa"}),
        "samples": ("lead_time", np.bincount([s.lead for s in chosen.samples], minlength=len(leads))),
        "lat": ("lat", truth.grid.latitudes_degrees, {"standard_name": "latitude", "units": "degrees_north"}),
        "lon": ("lon", truth.grid.longitudes_degrees, {"standard_name": "longitude", "units": "degrees_east"}),
    }
    texts = {name: text for name, (text, _) in SCORES.items()}
    texts["coverage"] = "share of the region's area with values in forecast and truth"
    found = {
        name: (("forecast", "variable", "lead_time", "region"), scores[name], {"long_name": text})
        for name, text in texts.items()
        if name in scores
    }
    inits = [time_text(sample.place.init)[:16] for sample in (chosen.samples[0], chosen.samples[-1])]
    return xr.Dataset(
        found,
        coordinates,
        {
            "source": "sfno-dist score; definitions of WeatherBench 2 (S. Rasp et al., 2024)",
            "forecast": ", ".join(file.path for file in forecasts.files),
            "truth": truth.path,
            "climatology": chosen.climatology.description if chosen.climatology else "",
            "members": forecasts.members,
            "initial_times": len({sample.init for sample in chosen.samples}),
            "first_initial_time": inits[0],
            "last_initial_time": inits[1],
        },
    )


def _level(level: float | None) -> float:
    return np.nan if level is None else float(level)


def _losses(result: xr.Dataset) -> list[str]:
    """Notes on variables whose scored area shrinks with the lead time, as where a model yields NaN."""
    area = result.coverage.sel(forecast="forecast", region="globe")
    shares = {str(v): (float(a.max()), float(a.min())) for v, a in area.groupby("variable")}
    return [
        f"{name}: the area scored falls from {most:.0%} to {least:.0%} of the globe"
        for name, (most, least) in shares.items()
        if most - least > 0.005
    ]
