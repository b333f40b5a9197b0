"""Small truths and forecasts of them, as files."""

from pathlib import Path

import numpy as np
import xarray as xr

from sfno_dist import Grid

GRID = Grid("equiangular", 13, 24)
UNITS = {"t2m": "K", "z500": "m**2 s**-2"}


def axes(grid: Grid = GRID) -> dict:
    return {"lat": grid.latitudes_degrees, "lon": grid.longitudes_degrees}


def truth_file(folder: Path, *, days: int = 12, gaps: bool = False, first: str = "2020-01-01") -> Path:
    """Two variables every 6 hours: a daily cycle and noise; with gaps, t2m is NaN over some land."""
    rng = np.random.default_rng(0)
    times = np.datetime64(first, "ns") + np.arange(4 * days) * np.timedelta64(6, "h")
    cycle = np.sin(2 * np.pi * np.arange(4 * days) / 4)[:, None, None]
    noise = rng.standard_normal((2, len(times), *GRID.shape)).astype("f4")
    fields = {"t2m": 280.0 + 5.0 * cycle + noise[0], "z500": 5e4 + 50.0 * noise[1]}
    if gaps:
        fields["t2m"][:, 3:6, 4:9] = np.nan
    data = {name: (("time", "lat", "lon"), x.astype("f4"), {"units": UNITS[name]}) for name, x in fields.items()}
    path = folder / "truth.nc"
    xr.Dataset(data, {"time": times, **axes()}).to_netcdf(path)
    return path


def forecast_of(truth: Path, inits: list[int], steps: int, *, members: int = 0, seed: int = 1) -> xr.Dataset:
    """The truth with noise that grows by the step, on (init_time, lead_time, [member], lat, lon)."""
    rng = np.random.default_rng(seed)
    with xr.open_dataset(truth) as data:
        data = data.load()
    shape = (len(inits), steps + 1, *([members] if members else []), *GRID.shape)
    places = np.array(inits)[:, None] + np.arange(steps + 1)
    growth = np.arange(steps + 1).reshape(1, -1, *[1] * (len(shape) - 2))
    dims = ("init_time", "lead_time", *(["member"] if members else []), "lat", "lon")
    fields = {}
    for name in UNITS:
        field = data[name].values[np.minimum(places, len(data.time) - 1)]
        field = field[:, :, None] if members else field
        spread = 0.2 if name == "t2m" else 20.0
        values = field + spread * growth * (0.3 + rng.standard_normal(shape))
        fields[name] = (dims, values.astype("f4"), {"units": UNITS[name]})
    leads = np.arange(steps + 1) * np.timedelta64(6, "h").astype("timedelta64[ns]")
    return xr.Dataset(fields, {"init_time": data.time.values[inits], "lead_time": leads, **axes()})
