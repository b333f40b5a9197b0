"""Pictures of scores: curves over the lead time, spectra, and maps; as images for a page."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from sfno_dist.scores.table import lead_text

STYLES = {
    "forecast": {"color": "#1f5fa8", "linewidth": 1.8, "zorder": 3},
    "persistence": {"color": "#777f88", "linewidth": 1.5, "linestyle": (0, (1, 1.2))},
    "climatology": {"color": "#c4671b", "linewidth": 1.2, "linestyle": (0, (5, 2))},
}
SPREAD = {"color": "#2a8f6a", "linewidth": 1.4, "linestyle": (0, (6, 1.5, 1, 1.5))}
LEAD_COLOURS = ("#9dc3e6", "#4a90d0", "#123f73")
TITLES = {
    "rmse": "RMSE",
    "mae": "MAE",
    "bias": "bias",
    "acc": "ACC",
    "crps": "CRPS (fair)",
    "spread_skill": "spread / skill",
}
LOOK: Any = {
    "font.size": 9,
    "axes.edgecolor": "#9aa3ad",
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "grid.color": "#e6e9ed",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": "#4a535d",
    "ytick.color": "#4a535d",
    "legend.frameon": False,
    "svg.hashsalt": "sfno_dist",
}


def curves(result: xr.Dataset, variable: str) -> str:
    """A row for each score, a column for each region; as the source of an ``<img>``."""
    one = result.sel(variable=variable)
    names = [name for name in TITLES if name in one and not one[name].isnull().all()]
    if one.attrs["members"] == 1:
        names.remove("crps")  # the MAE once more
    hours, label = _lead_axis(result)
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(12.4, 2.05 * len(names) + 0.5), layout="constrained")
        axes = figure.subplots(len(names), result.sizes["region"], squeeze=False, sharex=True, sharey="row")
        for row, name in zip(axes, names, strict=True):
            for axis, region in zip(row, result.region.values, strict=True):
                for kind in result.forecast.values:
                    _curve(axis, hours, one[name].sel(forecast=kind, region=region), str(kind), STYLES[str(kind)])
                if name == "rmse" and "spread" in one:
                    _curve(axis, hours, one.spread.sel(forecast="forecast", region=region), "spread", SPREAD)
                if name in ("bias", "spread_skill"):
                    axis.axhline(1.0 if name == "spread_skill" else 0.0, color="#4a535d", linewidth=0.6)
            units = str(one.units.values)
            row[0].set_ylabel(TITLES[name] + (f"  ({units})" if name not in ("acc", "spread_skill") and units else ""))
        for axis, region in zip(axes[0], result.region.values, strict=True):
            axis.set_title(str(region), fontsize=10)
        for axis in axes[-1]:
            axis.set_xlabel(label)
        axes[0, 0].legend(fontsize=8, handlelength=2.6)
        return _source(figure, "svg")


def spectra(result: xr.Dataset, variable: str) -> str:
    """Zonal power by wavenumber in each region: the forecast at some lead times, and the truth at the last of them."""
    power = result.power.sel(variable=variable, wavenumber=slice(1, -1))  # the last has half the others' count
    leads = result.map_lead_time.values
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(12.4, 2.9), layout="constrained")
        for axis, region in zip(
            figure.subplots(1, result.sizes["region"], sharey=True), result.region.values, strict=True
        ):
            chosen = power.sel(region=region)
            truth = chosen.sel(source="truth", lead_time=leads[-1])
            for lead, colour in zip(leads, LEAD_COLOURS[-len(leads) :], strict=True):
                text = "forecast, " + lead_text(lead, result.lead_time.units)
                line = chosen.sel(source="forecast", lead_time=lead)
                axis.loglog(line.wavenumber, line, color=colour, linewidth=1.4, label=text)
            # Over the others, which lie beneath it where the forecast is good.
            axis.loglog(truth.wavenumber, truth, color="black", linewidth=1.1, linestyle=(0, (4, 2)), label="truth")
            axis.set(title=str(region), xlabel="zonal wavenumber")
            axis.title.set_fontsize(10)
        figure.axes[0].set_ylabel("power")
        figure.axes[0].legend(fontsize=8)
        return _source(figure, "svg")


def maps(result: xr.Dataset, variable: str) -> str:
    """Bias and RMSE at each point, a row for each of some lead times."""
    one = result.sel(variable=variable)
    leads = result.map_lead_time.values
    with matplotlib.rc_context({**LOOK, "axes.grid": False}):
        figure = Figure(figsize=(12.4, 3.1 * len(leads)), layout="constrained")
        axes = figure.subplots(len(leads), 2, squeeze=False)
        for column, name, colours in zip(axes.T, ("bias_map", "rmse_map"), ("RdBu_r", "YlGnBu"), strict=True):
            most = float(np.nanquantile(np.abs(one[name]), 0.998)) or 1.0
            limits = {"vmin": -most if name == "bias_map" else 0.0, "vmax": most}
            for axis, lead in zip(column, leads, strict=True):
                image = _map(axis, one[name].sel(map_lead_time=lead), cmap=colours, **limits)
                text = lead_text(lead, result.lead_time.units)
                axis.set_title(f"{TITLES[name.removesuffix('_map')]}, {text}", fontsize=10)
            extend = "both" if name == "bias_map" else "max"
            figure.colorbar(image, ax=column.tolist(), shrink=0.6, label=str(one.units.values), extend=extend)
        return _source(figure, "png")


def _map(axis: Axes, field: xr.DataArray, **colours: Any) -> QuadMesh:
    """Latitude against longitude, each cell around its point; grey where there are no values."""
    half = 180.0 / field.sizes["lon"]
    image = axis.pcolormesh(field.lon, field.lat, field, shading="nearest", **colours)
    axis.set(xlim=(field.lon[0] - half, field.lon[-1] + half), ylim=(-90, 90), aspect="equal")
    axis.set(xticks=range(0, 360, 60), yticks=range(-90, 91, 30), facecolor="#dcdfe3")
    return image


def _curve(axis: Axes, leads: np.ndarray, values: xr.DataArray, label: str, style: dict) -> None:
    if values.notnull().any():
        axis.plot(leads, values, label=label, marker="o" if len(leads) <= 8 else None, markersize=3, **style)


def _lead_axis(result: xr.Dataset) -> tuple[np.ndarray, str]:
    leads, units = result.lead_time.values, result.lead_time.units
    return (
        (leads / 24.0, "lead time (days)") if units == "hours" and leads[-1] >= 72 else (leads, f"lead time ({units})")
    )


def _source(figure: Figure, form: str) -> str:
    """The figure as a data URI, which needs no file beside the page."""
    stream = BytesIO()
    figure.savefig(stream, format=form, dpi=100, metadata={"Date": None} if form == "svg" else None)
    kind = "image/svg+xml" if form == "svg" else "image/png"
    return f"data:{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
