"""Scores as a table in the terminal."""

from __future__ import annotations

import numpy as np
import xarray as xr

from sfno_dist.scores.definitions import REGIONS

LEADS = 6  # lead times shown at most


def lead_text(lead: float, units: str) -> str:
    """``6 h``, ``5 d`` or ``2 months``."""
    if units == "months":
        return f"{lead:g} month" + ("s" if lead != 1 else "")
    return f"{lead / 24:g} d" if lead >= 48 and lead % 24 == 0 else f"{lead:g} h"


def initial_times(result: xr.Dataset) -> str:
    """``17 initial times, 2020-01-01T00:00 to 2020-01-25T00:00``"""
    count, first = result.attrs["initial_times"], result.attrs["first_initial_time"]
    return (
        f"1 initial time, {first}"
        if count == 1
        else f"{count} initial times, {first} to {result.attrs['last_initial_time']}"
    )


def shown_leads(result: xr.Dataset) -> np.ndarray:
    """Some lead times from the first beyond 0 to the last, evenly spread   [at most LEADS]"""
    leads = result.lead_time.values
    leads = leads[leads > 0] if (leads > 0).any() else leads
    return leads[np.unique(np.linspace(0, len(leads) - 1, min(LEADS, len(leads))).round().astype(int))]


def rows(result: xr.Dataset, region: str = "globe") -> tuple[list[str], list[list[str]]]:
    """Head and cells: a row for each variable and shown lead time; a dash for what there is not."""
    kinds = [str(kind) for kind in result.forecast.values]
    own = [name for name in ("mae", "bias", "acc", "crps", "spread", "spread_skill") if name in result]
    titles = {
        "mae": "MAE",
        "bias": "bias",
        "acc": "ACC",
        "crps": "CRPS",
        "spread": "spread",
        "spread_skill": "spread/skill",
    }
    head = ["variable", "units", "lead", "fields", "RMSE", *kinds[1:], *(titles[name] for name in own)]
    cells = []
    for variable, units in zip(result.variable.values, result.units.values, strict=True):
        for lead in shown_leads(result):
            one = result.sel(variable=variable, lead_time=lead, region=region)
            values = [float(one.rmse.sel(forecast=kind)) for kind in kinds]
            values += [float(one[name].sel(forecast="forecast")) for name in own]
            first = [str(variable), str(units), lead_text(lead, result.lead_time.units), str(int(one.samples))]
            cells.append(first + ["-" if np.isnan(value) else f"{value:.4g}" for value in values])
    return head, cells


def table(result: xr.Dataset) -> str:
    """Over the globe; what is absent stands below it."""
    head, cells = rows(result)
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *cells]]
    title = f"globe, {initial_times(result)}; persistence and climatology: their RMSE"
    others = f"(also scored: {', '.join(list(REGIONS)[1:])})"
    return "\n".join([title, *lines, others, *(f"note: {note}" for note in result.attrs["notes"].splitlines())])
