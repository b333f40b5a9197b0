"""A forecast on disk: zarr that grows step by step under a hidden name, then takes its own name, as zarr or netCDF.

Chunks are whole fields (or rows of very large ones) whatever the layout of the processes, so that every layout writes
the same file, and no two processes write to one chunk. A file of netCDF-4 that is killed while open may be lost; a zarr
loses no more than the chunk being written, which is why netCDF too is made from one.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import xarray as xr
import zarr
from tqdm import tqdm

from sfno_dist.data import DataError
from sfno_dist.data.calendars import calendar_of, instants
from sfno_dist.data.names import cf_attributes
from sfno_dist.data.rechunk import create_field
from sfno_dist.data.recipe import Recipe

CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Layout:
    """What a forecast file holds: ``times`` [initial times, steps + 1], members (0: no ensemble), the recipe's outputs.

    ``attributes`` are those of the file.
    """

    recipe: Recipe
    times: np.ndarray
    members: int
    attributes: Mapping[str, Any]

    @property
    def dims(self) -> tuple[str, ...]:
        return ("init_time", "step", *(["member"] if self.members else []), "lat", "lon")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.times.shape, *([self.members] if self.members else []), *self.recipe.grid.shape)

    @property
    def chunks(self) -> tuple[int, ...]:
        nlat, nlon = self.recipe.grid.shape
        rows = min(nlat, max(1, CHUNK_BYTES // (4 * nlon)))
        return (*[1] * (len(self.shape) - 2), rows, nlon)

    def variable_attributes(self, v: int) -> dict[str, str]:
        name = self.recipe.outputs[v]
        return {**cf_attributes(name), "units": self.recipe.units[v], "coordinates": "lead_time time"}

    def coordinates(self) -> xr.Dataset:
        """With the attributes that CF-1.10 asks for."""
        times, grid = self.times, self.recipe.grid
        times = times if times.dtype == object else times.astype("datetime64[ns]")
        moments = instants(times.ravel()).reshape(times.shape)
        leads = (moments - moments[:, :1]).astype("timedelta64[us]").astype("timedelta64[ns]")
        calendar_months = self.recipe.step.unit == "months"  # which differ in length
        lead = (("init_time", "step"), leads) if calendar_months else ("step", leads[0])
        valid = {"standard_name": "time", "long_name": "valid time"}
        reference = {"standard_name": "forecast_reference_time", "long_name": "initial time", "axis": "T"}
        north = {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"}
        east = {"standard_name": "longitude", "units": "degrees_east", "axis": "X"}
        coordinates: dict[str, Any] = {
            "init_time": ("init_time", times[:, 0], reference),
            "step": ("step", np.arange(times.shape[1]), {"long_name": f"steps of {self.recipe.step}", "units": "1"}),
            "lead_time": (*lead, {"standard_name": "forecast_period", "long_name": "lead time"}),
            "time": (("init_time", "step"), times, valid),
            "lat": ("lat", grid.latitudes_degrees, north),
            "lon": ("lon", grid.longitudes_degrees, east),
        }
        if self.members:
            coordinates["member"] = ("member", np.arange(self.members), {"standard_name": "realization", "units": "1"})
        dataset = xr.Dataset(coords=coordinates, attrs=dict(self.attributes))
        dataset.lead_time.encoding = {"units": "hours", "dtype": "float64"}
        calendar = calendar_of(times.ravel())
        hours = {"units": "hours since 1900-01-01", "dtype": "float64", "calendar": calendar}
        dataset.time.encoding, dataset.init_time.encoding = dict(hours), dict(hours)
        return dataset


def create(layout: Layout, folder: Path) -> None:
    """The zarr with all coordinates and no field written yet."""
    layout.coordinates().to_zarr(folder, mode="w", zarr_format=3, consolidated=False)
    group = zarr.open_group(folder, mode="r+", zarr_format=3)
    for v, name in enumerate(layout.recipe.outputs):
        create_field(
            group, name, layout.shape, chunks=layout.chunks, dims=layout.dims, attributes=layout.variable_attributes(v)
        )


class Fields:
    """The arrays of a zarr that ``create`` made, for one field at a time."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._arrays = [_array(folder, name) for name in names]

    def write(self, v: int, place: tuple[int, ...], field: np.ndarray) -> None:
        """``field`` [nlat, nlon] of variable ``v`` at ``place``: (initial time, step[, member])."""
        self._arrays[v][place] = field


def adopt(layout: Layout, earlier: Path, folder: Path) -> None:
    """Puts the fields of a finished forecast of fewer initial times into the zarr in ``folder``, where they come first.

    Chunks of a zarr become second names of the same files, which are never written again.
    """
    with open_finished(earlier) as there:
        count = there.sizes["init_time"]
    for name in tqdm(layout.recipe.outputs, desc="fields that are there", unit="variable", delay=3.0):
        if earlier.is_dir():
            _link_chunks(earlier / name, folder / name)
            continue
        with netCDF4.Dataset(earlier) as data:
            data.set_auto_maskandscale(False)
            array, stored = _array(folder, name), data[name]
            for place in itertools.product(range(count), *map(range, layout.shape[1:-2])):
                array[place] = stored[place]


def _array(folder: Path, name: str) -> zarr.Array:
    return zarr.open_array(folder / name, mode="r+", zarr_format=3)


def _link_chunks(earlier: Path, array: Path) -> None:
    for root, _, files in os.walk(earlier / "c"):
        there = array / Path(root).relative_to(earlier)
        there.mkdir(parents=True, exist_ok=True)
        for file in files:
            try:
                os.link(Path(root) / file, there / file)
            except OSError:  # a file system without second names
                shutil.copyfile(Path(root) / file, there / file)


def finish(layout: Layout, folder: Path, output: Path) -> None:
    """Gives the finished zarr in ``folder`` its name, or makes netCDF of it."""
    if output.suffix != ".zarr":
        partial = folder.with_name("forecast.nc")  # goes with its folder, whenever this is killed
        try:
            _to_netcdf(layout, folder, partial, output.stem)
        except OSError:  # a full disk needs its place
            partial.unlink(missing_ok=True)
            raise
        os.replace(partial, output)
        written = folder.with_name("written.zarr")
        os.replace(folder, written)  # killed while it removes half of the chunks, none is taken for a forecast
        shutil.rmtree(written)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metadata that format 3 does not have yet, and xarray looks for
        zarr.consolidate_metadata(folder, zarr_format=3)
    aside = folder.with_name("replaced.zarr")
    if output.exists():
        os.replace(output, aside)
    os.replace(folder, output)
    shutil.rmtree(aside, ignore_errors=True)


def _to_netcdf(layout: Layout, folder: Path, path: Path, title: str) -> None:
    """Field by field, so that the memory does not grow with the forecast."""
    layout.coordinates().to_netcdf(path)
    arrays = {name: _array(folder, name) for name in layout.recipe.outputs}
    with netCDF4.Dataset(path, "a") as data:
        del data.coordinates  # xarray's, for a file without variables
        for v, name in enumerate(layout.recipe.outputs):
            data.createVariable(
                name, "f4", layout.dims, zlib=True, complevel=4, shuffle=True, chunksizes=layout.chunks,
                fill_value=np.float32(np.nan), chunk_cache=4 * math.prod(layout.chunks),
            ).setncatts(layout.variable_attributes(v))  # fmt: skip
        places = list(itertools.product(layout.recipe.outputs, *map(range, layout.shape[:-2])))
        for name, *place in tqdm(places, desc=f"writing {title}", unit="field", delay=3.0):
            data[name][tuple(place)] = arrays[name][tuple(place)]


def open_finished(path: Path) -> xr.Dataset:
    """A forecast that this module wrote; ``DataError`` for anything else."""
    if not path.is_dir() and not path.is_file():
        raise DataError(f"{path}: is no regular file; name another output")  # such as /dev/null, which stays
    try:
        options = {"engine": "zarr", "consolidated": False} if path.is_dir() else {"engine": "netcdf4"}
        dataset = xr.open_dataset(path, decode_timedelta=True, **options)
    except Exception as error:  # what other files raise is of many types
        raise DataError(f"{path}: cannot be read as a forecast ({str(error).splitlines()[0][:120]})") from error
    if "request" not in dataset.attrs or "init_time" not in dataset.dims:
        raise DataError(f"{path}: is no forecast that sfno-dist wrote; name another output")
    return dataset
