"""``verify``: the scores of forecasts over all initial times, beside persistence and climatology.

One field of one variable is in memory at a time (with its members), however many initial and lead times there are.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from tqdm import tqdm

from sfno_dist.data.calendars import time_text
from sfno_dist.scores.definitions import REGIONS, SCORES, finished
from sfno_dist.scores.forecasts import Forecasts
from sfno_dist.scores.plan import Climatology, Plan, plan
from sfno_dist.scores.totals import Totals
from sfno_dist.scores.truth import Truth

COVERAGE = "share of the region's area with values in forecast and truth"


def verify(forecasts: Forecasts, truth: Truth, climatology: Climatology | None = None) -> xr.Dataset:
    """Scores on (forecast, variable, lead_time, region), spectra by wavenumber, and maps of bias and RMSE.

    ``forecast`` is "forecast" and, where they can be had, "persistence" (the truth at the initial time) and
    "climatology". ``lead_time`` is in hours, or in months where the truth has one time a month. Maps are of the first,
    middle and last lead time. ``attrs["notes"]`` says what is absent and why. Raises ``DataError`` where the truth has
    none of the forecast's times, or other sums, and for fields without values.
    """
    chosen = plan(forecasts, truth, climatology)
    names = [variable.name for variable in forecasts.variables]
    totals = Totals(truth.grid, chosen.kinds, len(names), len(chosen.leads), chosen.map_leads)
    for sample in tqdm(chosen.samples, desc="scores", unit="field", leave=False):
        for v, name in enumerate(names):
            baselines = {}
            if chosen.persistence:
                baselines["persistence"] = truth.read(name, sample.init)
            if chosen.climatology:
                baselines["climatology"] = chosen.climatology(name, sample.place.valid)
            members = forecasts.read(sample.place, name)
            totals.add((v, sample.lead), members, truth.read(name, sample.valid), **baselines)
    result = _dataset(totals, chosen, truth).assign_coords(_coordinates(forecasts, truth, chosen))
    result.attrs = _attributes(forecasts, truth, chosen)
    result.attrs["notes"] = "\n".join(chosen.notes + _losses(result))
    return result


def _dataset(totals: Totals, chosen: Plan, truth: Truth) -> xr.Dataset:
    scores, maps = finished(totals.scores.means()), totals.maps.means()
    texts = {name: text for name, (text, _) in SCORES.items()} | {"coverage": COVERAGE}
    by_lead, on_map = ("variable", "lead_time", "region"), ("variable", "map_lead_time", "lat", "lon")
    power = {"long_name": "zonal power", "units": "units of the variable squared, times m"}
    found = {
        name: (("forecast", *by_lead), scores[name], {"long_name": texts[name]}) for name in texts if name in scores
    }
    return xr.Dataset(
        {
            **found,
            "power": (("source", *by_lead, "wavenumber"), totals.spectra.means()["power"], power),
            "bias_map": (on_map, maps["bias"].astype(np.float32), {"long_name": SCORES["bias"][0]}),
            "rmse_map": (on_map, np.sqrt(maps["mse"]).astype(np.float32), {"long_name": SCORES["rmse"][0]}),
        }
    )


def _coordinates(forecasts: Forecasts, truth: Truth, chosen: Plan) -> dict:
    monthly = truth.unit.unit == "months"
    leads = chosen.leads if monthly else chosen.leads / 60.0
    levels = [variable.quantity[1] for variable in forecasts.variables]
    return {
        "forecast": chosen.kinds,
        "source": ["forecast", "truth"],
        "variable": [variable.name for variable in forecasts.variables],
        "units": ("variable", [variable.units for variable in forecasts.variables]),
        "level": ("variable", [np.nan if level is None else float(level) for level in levels], {"units": "hPa"}),
        "lead_time": ("lead_time", leads, {"long_name": "lead time", "units": "months" if monthly else "hours"}),
        "map_lead_time": leads[chosen.map_leads],
        "samples": ("lead_time", np.bincount([s.lead for s in chosen.samples], minlength=len(leads))),
        "region": list(REGIONS),
        "lat": ("lat", truth.grid.latitudes_degrees, {"standard_name": "latitude", "units": "degrees_north"}),
        "lon": ("lon", truth.grid.longitudes_degrees, {"standard_name": "longitude", "units": "degrees_east"}),
    }


def _attributes(forecasts: Forecasts, truth: Truth, chosen: Plan) -> dict:
    return {
        "source": "sfno-dist score; definitions of WeatherBench 2 (S. Rasp et al., 2024)",
        "forecast": ", ".join(file.path for file in forecasts.files),
        "truth": truth.path,
        "climatology": chosen.climatology.description if chosen.climatology else "",
        "members": forecasts.members,
        "initial_times": len({sample.init for sample in chosen.samples}),
        "first_initial_time": time_text(chosen.samples[0].place.init)[:16],
        "last_initial_time": time_text(chosen.samples[-1].place.init)[:16],
    }


def _losses(result: xr.Dataset) -> list[str]:
    """Notes on variables whose scored area shrinks with the lead time, as where a model yields NaN."""
    notes = []
    for name in result.variable.values:
        area = result.coverage.sel(forecast="forecast", region="globe", variable=name).values
        if area.max() - area.min() > 0.005:
            notes.append(f"{name}: the area scored falls from {area.max():.0%} to {area.min():.0%} of the globe")
    return notes
