"""A forecast from a checkpoint: the model rolled out step by step, as CF-conventions netCDF.

Dims: T steps, V variables, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from tqdm import tqdm

from sfno_dist.data import DataError
from sfno_dist.data.calendars import as_gregorian, calendar_of, time_text
from sfno_dist.data.checks import files
from sfno_dist.data.output import whole_or_nothing
from sfno_dist.data.samples import FieldReader
from sfno_dist.data.timeline import in_calendar
from sfno_dist.training.checkpoint import LoadedCheckpoint
from sfno_dist.training.rollout import one_step


def forecast(checkpoint: LoadedCheckpoint, reader: FieldReader, *, init: np.datetime64, steps: int) -> xr.Dataset:
    """``steps`` steps from the fields at ``init``, which the data must hold.

    Returns a Dataset of the variables that come out on (time, lat, lon), ``time`` the valid time, with ``lead_time``
    and ``init_time`` beside it; NaN where the initial fields have no values. Raises ``DataError`` when the data do not
    fit the checkpoint, or lack the time or a later one at which prescribed variables are needed.
    """
    if steps < 1:
        raise DataError(f"a forecast has at least 1 step, got {steps}")
    recipe = checkpoint.recipe
    recipe.check(reader.dataset, reader.source)
    index = find_time(reader, init, checkpoint)
    start = reader.times[index]
    times = [_valid_time(reader, start, n, checkpoint) for n in range(steps + 1)]
    fields = np.stack(list(_rollout(checkpoint, reader, index, times)))
    return _dataset(checkpoint, fields, times)


def truth(reader: FieldReader, result: xr.Dataset, checkpoint: LoadedCheckpoint) -> xr.Dataset:
    """The data at those valid times of a forecast that the data hold; may be empty along time."""
    ordinals = checkpoint.recipe.step.ordinals
    held = dict(zip(ordinals(reader.times).tolist(), range(len(reader.times)), strict=True))
    places = [(n, held[o]) for n, o in enumerate(ordinals(result.time.values).tolist()) if o in held]
    fields = np.zeros((0, *_shape(checkpoint)))
    if places:
        fields = reader.read([index for _, index in places])[:, : checkpoint.recipe.out_channels]
    coordinates = {"time": result.time.values[[n for n, _ in places]], "lat": result.lat, "lon": result.lon}
    variables = enumerate(checkpoint.recipe.outputs)
    return xr.Dataset({name: (("time", "lat", "lon"), fields[:, v]) for v, name in variables}, coordinates)


def find_time(reader: FieldReader, init: np.datetime64, checkpoint: LoadedCheckpoint) -> int:
    """Index of the time that ``init`` names: the same instant, or for steps of months the same month."""
    init = in_calendar(init, reader.times)
    ordinals = checkpoint.recipe.step.ordinals(reader.times)
    wanted = checkpoint.recipe.step.ordinals(np.array([init]))[0]
    found = np.flatnonzero(ordinals == wanted)
    if len(found) == 0:
        places = [0, int(np.argmin(np.abs(ordinals - wanted))), -1]
        first, nearest, last = (time_text(time)[:16] for time in reader.times[places])
        raise DataError(
            f"{reader.source}: no data at {time_text(init)[:16]}; the nearest time is {nearest}, the data run from "
            f"{first} to {last}"
        )
    return int(found[0])


def check_output(sources: Sequence[str], path: str | Path) -> None:
    """``DataError`` when a file cannot be written there, or would replace the data that the forecast starts from."""
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file such as {path / 'forecast.nc'}")
    if not path.parent.is_dir():
        raise DataError(f"{path}: the folder {path.parent} does not exist; create it first")
    if path.absolute() in [Path(source).absolute() for source in files(sources)]:
        raise DataError(f"{path}: is the file that the forecast starts from; choose another output")


def write(result: xr.Dataset, path: str | Path) -> None:
    """Compressed netCDF-4 under its final name only once it is whole."""
    path = Path(path)
    try:
        with whole_or_nothing(path, overwrite=True) as partial:
            result.to_netcdf(partial, encoding={name: {"zlib": True, "complevel": 4} for name in result.data_vars})
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error


def _valid_time(reader: FieldReader, start: np.datetime64, steps: int, checkpoint: LoadedCheckpoint) -> np.datetime64:
    """The time ``steps`` after ``start``; where the data have that month they say at what hour it is stamped."""
    step = checkpoint.recipe.step
    time = step.advance(start, steps)
    found = np.flatnonzero(step.ordinals(reader.times) == step.ordinals(np.array([time]))[0])
    return reader.times[found[0]] if len(found) else time


@torch.inference_mode()
def _rollout(checkpoint: LoadedCheckpoint, reader: FieldReader, index: int, times: list) -> Iterator[np.ndarray]:
    """Fields at each time of ``times``, the first being those of the data at ``index``   [V, H, W] in their units"""
    recipe = checkpoint.recipe
    fields, outputs = reader(index), recipe.out_channels
    yield fields[:outputs]
    normalised, valid = recipe.normalised(fields)
    state, known = (torch.from_numpy(x[:outputs])[None] for x in (normalised, valid))
    filling = state  # what stands for missing values, where there are none
    dates = as_gregorian(np.array(times))
    for n, (now, target) in enumerate(tqdm(list(pairwise(dates)), desc="forecast", unit="step")):
        if n > 0 and recipe.roles.prescribed:
            normalised, valid = recipe.normalised(_prescribed(checkpoint, reader, times[n]))
        features = torch.from_numpy(recipe.inputs(normalised, valid, now, target))[None]
        state = one_step(checkpoint.model, recipe, state, features)
        state = torch.where(known, state, filling)
        forecast = recipe.statistics.physical(state[0])
        yield torch.where(known[0], forecast, torch.nan).numpy()


def _prescribed(checkpoint: LoadedCheckpoint, reader: FieldReader, time: np.datetime64) -> np.ndarray:
    """Fields of the data at a later time of the forecast, for the variables that the model takes from there."""
    try:
        return reader(find_time(reader, time, checkpoint))
    except DataError as error:
        names = ", ".join(checkpoint.recipe.roles.prescribed)
        raise DataError(f"{error}; the model takes {names} from the data at every step") from error


def _dataset(checkpoint: LoadedCheckpoint, fields: np.ndarray, times: list[np.datetime64]) -> xr.Dataset:
    """With the attributes that CF-1.10 asks for."""
    recipe = checkpoint.recipe
    valid = np.array(times)
    gregorian = valid.dtype != object
    valid = valid.astype("datetime64[ns]") if gregorian else valid
    coordinates = {
        "time": ("time", valid, {"standard_name": "time", "long_name": "valid time", "axis": "T"}),
        "lat": (
            "lat",
            recipe.grid.latitudes_degrees,
            {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"},
        ),
        "lon": (
            "lon",
            recipe.grid.longitudes_degrees,
            {"standard_name": "longitude", "units": "degrees_east", "axis": "X"},
        ),
        "lead_time": ("time", valid - valid[0], {"standard_name": "forecast_period", "long_name": "lead time"}),
        "init_time": ((), valid[0], {"standard_name": "forecast_reference_time", "long_name": "initial time"}),
    }
    variables = {
        name: (("time", "lat", "lon"), fields[:, v], {"units": recipe.units[v], "long_name": name})
        for v, name in enumerate(recipe.outputs)
    }
    result = xr.Dataset(variables, coordinates, {"Conventions": "CF-1.10", "source": "sfno_dist forecast"})
    result.lead_time.encoding = {"units": "hours", "dtype": "float64"}
    hours = {"units": "hours since 1900-01-01", "dtype": "float64", "calendar": calendar_of(valid)}
    result.time.encoding = result.init_time.encoding = hours
    return result


def _shape(checkpoint: LoadedCheckpoint) -> tuple[int, int, int]:
    return len(checkpoint.recipe.outputs), *checkpoint.recipe.grid.shape
