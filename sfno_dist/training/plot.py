"""Pictures: maps of a forecast beside the truth, and curves of a training run."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sfno_dist.data.recipe import Recipe
from sfno_dist.data.timeline import TimeStep


def forecast_maps(
    result: xr.Dataset, truth: xr.Dataset | None, recipe: Recipe, path: str | Path, *, steps: int
) -> None:
    """One row of maps per variable at the last time of ``result``, ``steps`` after its first: the forecast.

    Beside it the last time of ``truth``, where there is one, and the difference.
    """
    known = truth is not None
    columns = ["forecast", "truth", "forecast - truth"] if known else ["forecast"]
    figure = Figure(figsize=(4.6 * len(columns), 0.5 + 2.5 * len(recipe.outputs)), layout="constrained")
    axes = figure.subplots(len(recipe.outputs), len(columns), squeeze=False)
    for row, name in zip(axes, recipe.outputs, strict=True):
        maps = {"forecast": result[name][-1]}
        if truth is not None:
            maps |= {"truth": truth[name][-1], "forecast - truth": result[name][-1] - truth[name][-1]}
        low, high = (float(f(maps[c] for c in columns[:2] if c in maps)) for f in (_lowest, _highest))
        for axis, column in zip(row, columns, strict=True):
            reach = float(abs(maps[column]).max()) if column == "forecast - truth" else max(abs(low), abs(high))
            signed = low < 0 < high or column == "forecast - truth"
            limits = (-reach, reach) if signed else (low, high)
            _map(axis, maps[column], recipe, limits, "RdBu_r" if signed else "viridis")
            axis.set_title(f"{name}  {column}", fontsize=10)
            image = axis.collections[0]
            figure.colorbar(image, ax=axis, shrink=0.85, label=str(result[name].attrs.get("units", "")))
    lead = TimeStep(recipe.step.count * steps, recipe.step.unit)
    unit = "D" if recipe.step.unit == "months" else "h"
    start, end = result.time.values[[0, -1]].astype(f"datetime64[{unit}]").astype(str)
    figure.suptitle(f"from {start}, {lead} ahead: {end}")
    figure.savefig(path, dpi=110)


def training_curves(metrics_csv: Path, recipe: Recipe, path: Path) -> None:
    """Loss, and the validation RMSE of each variable beside its baselines, over the optimiser steps."""
    with metrics_csv.open() as file:
        rows = list(csv.DictReader(file))

    def series(name: str) -> tuple[list[int], list[float]]:
        points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        return [step for step, _ in points], [value for _, value in points]

    figure = Figure(figsize=(4.6 * (1 + len(recipe.outputs)), 3.4), layout="constrained")
    axes = figure.subplots(1, 1 + len(recipe.outputs), squeeze=False)[0]
    for name in ("train/loss", "validation/loss"):
        axes[0].plot(*series(name), label=name, linewidth=1.2)
    axes[0].set(title="area-weighted loss", xlabel="optimiser step", yscale="log")
    for axis, variable, units in zip(axes[1:], recipe.outputs, recipe.units, strict=False):
        for forecast, style in (("model", ".-"), ("persistence", ":"), ("climatology", "--")):
            steps, values = series(f"validation/rmse_{variable}_{forecast}")
            if np.isfinite(values).any():
                axis.plot(steps, values, style, label=forecast)
        axis.set(title=f"validation RMSE of {variable}", xlabel="optimiser step", ylabel=units)
    for axis in axes:
        axis.legend(fontsize=8, loc="upper right")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _map(axis: Axes, field: xr.DataArray, recipe: Recipe, limits: tuple[float, float], colours: str) -> None:
    """Latitude against longitude, with coastlines from the relief where the recipe has it."""
    lon, lat = recipe.grid.longitudes_degrees, recipe.grid.latitudes_degrees
    axis.pcolormesh(lon, lat, field.values, vmin=limits[0], vmax=limits[1], cmap=colours, shading="nearest")
    if recipe.relief is not None:
        axis.contour(lon, lat, recipe.relief, levels=[0.0], colors="black", linewidths=0.6)
    axis.set(
        xlim=(lon[0], lon[-1]), ylim=(-90, 90), xticks=range(0, 360, 90), yticks=range(-90, 91, 45), aspect="equal"
    )
    axis.tick_params(labelsize=7)


def _lowest(fields) -> float:
    return min(float(field.min()) for field in fields)


def _highest(fields) -> float:
    return max(float(field.max()) for field in fields)
