"""Variables that are sums over a time interval, of which no value may be left out."""

from __future__ import annotations

import re

import numpy as np
import xarray as xr

from sfno_dist.data.calendars import instants
from sfno_dist.data.errors import DataError

#: ECMWF's accumulated surface fields, in their short and long names
ACCUMULATED = {
    "tp", "cp", "lsp", "sf", "smlt", "e", "pev", "ro", "sro", "ssro", "ssr", "str", "tsr", "ttr", "ssrd", "strd",
    "ssrc", "strc", "tsrc", "ttrc", "tisr", "fdir", "sshf", "slhf", "ewss", "nsss", "total_precipitation",
    "convective_precipitation", "large_scale_precipitation", "snowfall", "evaporation", "runoff",
    "surface_net_solar_radiation", "surface_net_thermal_radiation", "top_net_solar_radiation",
    "top_net_thermal_radiation", "surface_solar_radiation_downwards", "surface_thermal_radiation_downwards",
    "surface_sensible_heat_flux", "surface_latent_heat_flux",
}  # fmt: skip
HOURS = {"second": 1 / 3600, "minute": 1 / 60, "hour": 1.0, "hr": 1.0, "h": 1.0, "day": 24.0, "month": 30.0 * 24.0}


def accumulation_hours(name: str, attributes: dict, times: np.ndarray) -> float | None:
    """Hours over which a variable is summed, None for one that is not.

    From CF ``cell_methods`` or a name such as ``total_precipitation_6hr``; where the file says no more than that it is
    a sum, the usual spacing of its times.
    """
    methods = str(attributes.get("cell_methods", ""))
    found = re.search(r"time: sum(?:.*?interval: ([\d.]+) (\w+?)s?\))?", methods)
    suffix = re.fullmatch(r"(.+?)_?(\d+)h(?:rs?|ours?)?", name.lower())
    base = suffix[1] if suffix and suffix[1] in ACCUMULATED else name.lower()
    unit = str(attributes.get("units", ""))
    is_rate = re.search(r"s(\*\*|\^)?-1|/s|/day|d-1|W m", unit) is not None
    if not found and (is_rate or (base not in ACCUMULATED and attributes.get("GRIB_stepType") != "accum")):
        return None
    if found and found[1] and found[2] in HOURS:
        return float(found[1]) * HOURS[found[2]]
    if suffix and suffix[1] in ACCUMULATED:
        return float(suffix[2])
    gaps = np.diff(instants(times))
    values, counts = np.unique(gaps, return_counts=True)
    return float(values[counts.argmax()]) / 3.6e9 if gaps.size else None


def check_accumulations(dataset: xr.Dataset, step_hours: float, source: str) -> None:
    """``DataError`` where a step leaves out part of a sum, or counts a part twice: tp of 1 hour at a step of 6."""
    for name, field in dataset.data_vars.items():
        hours = field.attrs.get("accumulation_hours")
        if hours is not None and abs(hours - step_hours) > 0.01 * step_hours:
            raise DataError(
                f"{source}: {name} is accumulated over {hours:g} h, the step is {step_hours:g} h: single values would "
                f"stand for {hours / step_hours:.2g} of each step; sum it to {step_hours:g} h first, or use a step of "
                f"{hours:g} h"
            )
