"""What turns files into a model's inputs, and its outputs back into fields; stored whole in every checkpoint.

Dims: V variables, F feature channels, H rows, W columns.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from sfno_dist.data.errors import DataError
from sfno_dist.data.solar import cos_zenith, year_phase
from sfno_dist.data.statistics import Statistics
from sfno_dist.data.timeline import TimeStep
from sfno_dist.geometry import Grid

FEATURES = {
    "position": "sines and cosines of latitude and longitude (3 channels)",
    "relief": "height of the surface, standardised (1)",
    "year_phase": "cosine and sine of the target time's place in the year (2)",
    "cos_zenith": "cosine of the solar zenith angle at the target time (1)",
    "climatology": "mean of the training years for the months of now and of the target (2 per variable)",
}


@dataclass(frozen=True)
class Recipe:
    """Variables in their order, their units, grid, time step, features and statistics.

    ``relief`` [H, W] is the height of the surface in metres, or None where the data set has none.
    """

    variables: tuple[str, ...]
    units: tuple[str, ...]
    grid: Grid
    step: TimeStep
    features: tuple[str, ...]
    statistics: Statistics
    relief: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in self.features:
            if name not in FEATURES:
                raise DataError(f"unknown feature {name!r} in data.features; choose among {', '.join(FEATURES)}")
        if "relief" in self.features and self.relief is None:
            raise DataError("data.features asks for 'relief' but data.relief names no file; set it or drop the feature")

    @property
    def state_channels(self) -> int:
        return len(self.variables)

    @property
    def in_channels(self) -> int:
        """Channels that enter the model: the state, then the features."""
        sizes = {"position": 3, "relief": 1, "year_phase": 2, "cos_zenith": 1, "climatology": 2 * len(self.variables)}
        return self.state_channels + sum(sizes[name] for name in self.features)

    def feature_fields(self, now: np.datetime64, target: np.datetime64) -> np.ndarray:
        """The features for a step from ``now`` to ``target``   [F, H, W] float32"""
        phase = year_phase(target)
        blocks = {
            "position": lambda: self.grid.positions,
            "relief": lambda: _standardised(self.relief, self.grid),
            "year_phase": lambda: np.full((2, *self.grid.shape), [[[np.cos(phase)]], [[np.sin(phase)]]]),
            "cos_zenith": lambda: cos_zenith(target, self.grid)[None],
            "climatology": lambda: np.concatenate([self.climatology(now), self.climatology(target)]),
        }
        if not self.features:
            return np.zeros((0, *self.grid.shape), dtype=np.float32)
        return np.concatenate([blocks[name]() for name in self.features]).astype(np.float32)

    def climatology(self, time: np.datetime64) -> np.ndarray:
        """Normalised climatology of the month of ``time``; ``DataError`` for one without   [V, H, W] float32"""
        field = self.statistics.month_climatology(time)
        if np.isnan(field[0, 0, 0]):
            raise DataError(
                f"the training period has no time in the month of {np.datetime_as_string(time, 'D')}, so there is no "
                f"climatology for it; lengthen data.splits.train or drop 'climatology' from data.features"
            )
        return field

    def check(self, dataset: xr.Dataset, source: str) -> None:
        """``DataError`` saying what differs when canonical ``dataset`` does not fit this recipe."""
        for name, unit in zip(self.variables, self.units, strict=True):
            if name not in dataset:
                raise DataError(
                    f"{source}: the checkpoint needs variable {name}, the data have {', '.join(map(str, dataset))}"
                )
            found = str(dataset[name].attrs.get("units", ""))
            if found != unit:
                raise DataError(f"{source}: {name} is in {found!r}, the checkpoint was trained on {unit!r}; convert it")
        grid = Grid.from_coordinates(dataset.lat.values, dataset.lon.values)
        if grid != self.grid:
            raise DataError(
                f"{source}: the data are on grid {grid}, the checkpoint is for {self.grid}; regrid the data"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and tensors, as ``torch.load(weights_only=True)`` accepts."""
        statistics = {name: torch.from_numpy(array.copy()) for name, array in vars(self.statistics).items()}
        return {
            "variables": list(self.variables),
            "units": list(self.units),
            "grid": asdict(self.grid),
            "step": asdict(self.step),
            "features": list(self.features),
            "statistics": statistics,
            "relief": None if self.relief is None else torch.from_numpy(self.relief.copy()),
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Recipe:
        return cls(
            variables=tuple(stored["variables"]),
            units=tuple(stored["units"]),
            grid=Grid(**stored["grid"]),
            step=TimeStep(**stored["step"]),
            features=tuple(stored["features"]),
            statistics=Statistics(**{name: tensor.numpy() for name, tensor in stored["statistics"].items()}),
            relief=None if stored["relief"] is None else stored["relief"].numpy(),
        )


def _standardised(field: np.ndarray | None, grid: Grid) -> np.ndarray:
    """Area mean 0 and spread 1   [1, H, W]"""
    assert field is not None  # __post_init__ refuses the feature without its field
    centred = field - (field * grid.area_shares).sum()
    spread = np.sqrt((centred**2 * grid.area_shares).sum())
    return (centred / (spread if spread > 0 else 1.0))[None]
