"""A small archive with every kind of variable, and the DataModule on it."""

from pathlib import Path

import numpy as np
import xarray as xr

from sfno_dist import Grid
from sfno_dist.data.datamodule import WeatherDataModule

GRID = Grid("equiangular", 13, 22)
SPLITS = {
    "train": ["2020-01-01", "2020-01-06"],
    "validation": ["2020-01-07", "2020-01-08"],
    "test": ["2020-01-09", "2020-01-10"],
}
LAND = (GRID.positions[1] > 0.3) & (GRID.positions[0] > -0.5)  # where sst has no values


def archive(folder: Path, *, hours: int = 6, days: int = 10, grid: Grid = GRID, kind: str = "netcdf") -> str:
    """t2m and z500; sst, NaN over land; tp, accumulated over ``hours``; relief and the share of land in other files."""
    rng = np.random.default_rng(0)
    times = np.datetime64("2020-01-01", "ns") + np.arange(days * 24 // hours) * np.timedelta64(hours, "h")
    noise = rng.standard_normal((4, len(times), *grid.shape)).astype(np.float32)
    sst = 290.0 + 5.0 * noise[2]
    if grid == GRID:
        sst[:, LAND] = np.nan
    values = {"t2m": (280.0 + 10.0 * noise[0], "K"), "z500": (5e4 + 30.0 * noise[1], "m**2 s**-2"), "sst": (sst, "K")}
    values["tp"] = (np.maximum(noise[3], 0.0) * 1e-3, "m")
    axes = {"latitude": ("latitude", grid.latitudes_degrees, {"units": "degrees_north"})}
    axes["longitude"] = ("longitude", grid.longitudes_degrees, {"units": "degrees_east"})
    data = xr.Dataset(
        {name: (("time", *axes), field.astype("f4"), {"units": unit}) for name, (field, unit) in values.items()},
        {"time": times, **axes},
    )
    data.tp.attrs["cell_methods"] = f"time: sum (interval: {hours} hours)"
    fine = Grid("equiangular-offset", 36, 72)
    static = {"latitude": fine.latitudes_degrees, "longitude": fine.longitudes_degrees}
    relief = xr.Dataset({"z": (tuple(static), 1000.0 * rng.standard_normal(fine.shape), {"units": "m"})}, static)
    relief["lsm"] = (relief.z > 0).astype("f4")
    relief.to_netcdf(folder / "static.nc")
    path = folder / ("a.zarr" if kind == "zarr" else "a.nc")
    data.to_zarr(path) if kind == "zarr" else data.to_netcdf(path)
    return str(path)


def everything(folder: Path, path: str, **changes) -> WeatherDataModule:
    """All kinds of variables, features and options at once."""
    static = str(folder / "static.nc")
    options = {
        "variables": ["t2m", "z500", "sst"],
        "diagnostic": ["tp"],
        "splits": SPLITS,
        "step": "6 hours",
        "features": ["position", "relief", "land_mask", "year_phase", "day_phase", "cos_zenith", "climatology"],
        "relief": {"path": static, "variable": "z"},
        "land_mask": {"path": static, "variable": "lsm"},
        "fill": {"sst": 271.5},
        "mask_channels": ["sst"],
        "log_epsilon": {"tp": 1e-5},
        "batch_size": 4,
        "rollout_steps": {"train": 2},
        "seed": 3,
    }
    return WeatherDataModule(path, **{**options, **changes})
