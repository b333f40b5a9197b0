"""``sfno-dist demo``: weather-like data of any size and step, from a stirred barotropic flow over mountains.

Two jets that are held up against friction, waves and vortices stirred along them as by passing depressions (after
Vallis et al. 2004, doi:10.1175/1520-0469(2004)061<0264:AMASDM>2.0.CO;2), and a relief that the flow goes around.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import netCDF4
import numpy as np
import xarray as xr
import zarr
from tqdm import tqdm

from sfno_dist.data.barotropic import GRAVITY, BarotropicFlow, Harmonics
from sfno_dist.data.errors import DataError
from sfno_dist.data.output import check_output, whole_or_nothing
from sfno_dist.geometry import Grid

DAY = 86400.0
START = np.datetime64("2000-01-01T00", "ns")
SPIN_UP_DAYS = 20
MOST_DEGREES = 85  # the flow itself needs no finer scales than the waves in it
STIRRING = 2e-11  # 1/s2, of each coefficient
DEPTH = 10_000.0  # m, of the layer that flows; its top lies about MEAN_HEIGHT at 500 hPa
MEAN_HEIGHT = 5_500.0
FIELDS = {
    "u": ("m s**-1", "eastward_wind"),
    "v": ("m s**-1", "northward_wind"),
    "z": ("m**2 s**-2", "geopotential"),
    "vo": ("s**-1", "atmosphere_relative_vorticity"),
}


class DemoWeather:
    """A flow, told by ``seed``, and its fields on any grid: ``fields()`` now, ``advance(hours)`` moves it on.

    The same seed and grid give the same weather, bit for bit on one machine; how far it is taken does not change it.
    """

    def __init__(self, grid: Grid, *, seed: int = 0) -> None:
        truncation = min(MOST_DEGREES, (2 * grid.nlat - 3) // 3, (grid.nlon - 1) // 2)
        if truncation < 10:
            raise DataError(f"demo: a grid of {grid.nlat} x {grid.nlon} is too coarse; take at least 24 x 48")
        self.random = np.random.default_rng(seed)
        self.relief = _relief(Harmonics(Grid("legendre-gauss", 64, 128), truncation=15), self.random, truncation)
        self.flow = BarotropicFlow(truncation, relief=self.relief / DEPTH, damping_s=0.1 * DAY)
        self.output = Harmonics(grid, truncation)
        self.jets = _jets(self.flow.harmonics)
        self.stirring = np.zeros_like(self.jets)
        self.seconds = 3600.0 if truncation <= 42 else 1800.0
        self.zeta = self.jets
        self.advance(24 * SPIN_UP_DAYS)

    def advance(self, hours: int) -> None:
        for _ in range(round(hours * 3600 / self.seconds)):
            self._stir()
            pull = (self.jets - self.zeta) / (6 * DAY)  # of the zonal mean towards the jets, of the rest towards rest
            self.zeta = self.flow.step(self.zeta, self.seconds, pull + self.stirring)

    def _stir(self) -> None:
        """Random vorticity of degrees 8 to 13 that lives for two days, along the jets."""
        keep = np.exp(-self.seconds / (2 * DAY))
        size = 14
        noise = np.zeros_like(self.jets)
        drawn = self.random.standard_normal((2, size, size))
        noise[:size, :size] = (drawn[0] + 1j * drawn[1]) * np.triu(np.ones((size, size)))
        noise[:3] = 0.0
        noise[:, :8] = 0.0
        spherical = self.flow.harmonics
        along_jets = np.exp(-(((np.abs(np.degrees(np.arcsin(spherical.mu))) - 45) / 14) ** 2))[:, None]
        noise = spherical.coefficients(along_jets * spherical.field(noise))
        self.stirring = keep * self.stirring + np.sqrt(1 - keep**2) * STIRRING * noise

    def fields(self) -> dict[str, np.ndarray]:
        """u, v, z and vo on the grid   [H, W] float32"""
        output, cosine = self.output, np.sqrt(self.output.cosine2)
        east, north = output.winds(self.zeta * output.inverse)
        phi = GRAVITY * MEAN_HEIGHT + output.field(self.flow.geopotential(self.zeta))
        fields = {"u": east / cosine, "v": north / cosine, "z": phi, "vo": output.field(self.zeta)}
        return {name: field.astype(np.float32) for name, field in fields.items()}

    def orography(self) -> np.ndarray:
        """Height of the ground in m   [H, W] float32"""
        return self.output.field(self.relief).astype(np.float32)


def _jets(spherical: Harmonics) -> np.ndarray:
    """Vorticity of two westerly jets at 45 degrees and easterlies between them   [M, N]"""
    latitude = np.degrees(np.arcsin(spherical.mu))[:, None]
    east = 32 * np.exp(-(((np.abs(latitude) - 45) / 12) ** 2)) - 8 * np.exp(-((latitude / 18) ** 2))
    east = east * np.sqrt(spherical.cosine2) + np.zeros(spherical.grid.shape)
    return spherical.divergence(np.zeros_like(east), -east)


def _relief(spherical: Harmonics, random: np.random.Generator, truncation: int) -> np.ndarray:
    """Three ranges of mountains at random places, in coefficients of m   [M, N], degrees up to 15"""
    latitude = np.arcsin(spherical.mu)[:, None]
    longitude = np.radians(spherical.grid.longitudes_degrees)[None]
    height = np.zeros(spherical.grid.shape)
    for top, side in ((3500.0, 1), (2500.0, 1), (2500.0, -1)):
        where, along = side * np.radians(random.uniform(25, 50)), random.uniform(0, 2 * np.pi)
        cosine = np.sin(latitude) * np.sin(where) + np.cos(latitude) * np.cos(where) * np.cos(longitude - along)
        height += top * np.exp(-((np.arccos(np.clip(cosine, -1, 1)) / 0.3) ** 2))
    relief = np.zeros((truncation + 1, truncation + 1), np.complex128)
    size = min(truncation, spherical.truncation) + 1
    relief[:size, :size] = spherical.coefficients(height)[:size, :size]
    return relief


def write_demo(
    output: str | os.PathLike,
    *,
    nlat: int = 64,
    nlon: int = 128,
    days: int = 60,
    step_hours: int = 6,
    seed: int = 0,
    progress: bool = False,
) -> None:
    """Writes demo weather as netCDF (``.nc``) or zarr (``.zarr``), one time x one globe in a chunk.

    On an equiangular grid: with both poles where ``nlat`` is odd, of cell centres where it is even. Times from
    2000-01-01 on. Raises ``DataError`` for sizes that make no weather and where ``output`` exists.
    """
    target = Path(output)
    if target.suffix not in (".nc", ".zarr"):
        raise DataError(f"{target}: name a file that ends in .nc or a folder that ends in .zarr")
    for name, value in (("nlat", nlat), ("nlon", nlon), ("days", days), ("step_hours", step_hours)):
        if value < 1:
            raise DataError(f"demo: {name} must be at least 1, got {value}")
    check_output(target)
    weather = DemoWeather(Grid("equiangular" if nlat % 2 else "equiangular-offset", nlat, nlon), seed=seed)
    times = START + np.arange(days * 24 // step_hours) * np.timedelta64(step_hours, "h")
    if times.size == 0:
        raise DataError(f"demo: no step of {step_hours} hours fits into {days} days")
    with whole_or_nothing(target) as partial, _opened(partial, target.suffix, times, weather) as arrays:
        for index in tqdm(range(len(times)), desc=target.name, unit="time", disable=not progress):
            for name, field in weather.fields().items():
                arrays[name][index] = field
            weather.advance(step_hours)


@contextmanager
def _opened(path: Path, suffix: str, times: np.ndarray, weather: DemoWeather) -> Iterator[dict]:
    """The arrays to be filled, by name."""
    grid = weather.output.grid
    dims, shape = ("time", "latitude", "longitude"), (len(times), *grid.shape)
    attributes: dict[str, dict] = {name: {"units": units, "standard_name": cf} for name, (units, cf) in FIELDS.items()}
    start = xr.Dataset(
        {"orography": (dims[1:], weather.orography(), {"units": "m", "standard_name": "surface_altitude"})},
        {
            "time": times,
            "latitude": ("latitude", grid.latitudes_degrees, {"units": "degrees_north"}),
            "longitude": ("longitude", grid.longitudes_degrees, {"units": "degrees_east"}),
        },
        {"Conventions": "CF-1.8", "title": "barotropic flow over mountains, not observed weather"},
    )
    if suffix == ".zarr":
        start.to_zarr(path, mode="w-", consolidated=False)
        group = zarr.open_group(path, mode="r+")
        arrays: dict = {}
        for name, about in attributes.items():
            arrays[name] = group.create_array(
                name,
                shape=shape,
                dtype="float32",
                chunks=(1, *grid.shape),
                fill_value=float("nan"),
                dimension_names=dims,
                attributes=about,
            )
        yield arrays
        return
    start.to_netcdf(path, engine="netcdf4")
    with netCDF4.Dataset(path, "a") as file:
        arrays = {}
        for name, about in attributes.items():
            arrays[name] = file.createVariable(name, "f4", dims, chunksizes=(1, *grid.shape))
            arrays[name].setncatts(about)
        yield arrays
