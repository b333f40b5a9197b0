"""What turns files into a model's inputs, and its outputs back into fields; stored whole in every checkpoint.

Dims: V variables, F feature channels, H rows and W columns of the tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xarray as xr

from sfno_dist.data.errors import DataError
from sfno_dist.data.forcings import FEATURES
from sfno_dist.data.statistics import Statistics
from sfno_dist.data.timeline import TimeStep
from sfno_dist.geometry import Grid
from sfno_dist.mesh import Decomposition, ProcessMesh

MAPS = ("relief", "land_mask")


@dataclass(frozen=True)
class Roles:
    """Variables by what the model does with them, in the order of its channels.

    ``prognostic`` go in and come out; ``diagnostic`` come out only; ``prescribed`` go in only, read at every step.
    """

    prognostic: tuple[str, ...]
    diagnostic: tuple[str, ...] = ()
    prescribed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prognostic:
            raise DataError(
                "data.variables names no variable; a forecast needs at least one that goes in and comes out"
            )
        twice = sorted({name for name in self.variables if self.variables.count(name) > 1})
        if twice:
            raise DataError(
                f"{', '.join(twice)}: named twice among data.variables, data.diagnostic and data.prescribed"
            )

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.prognostic + self.diagnostic

    @property
    def variables(self) -> tuple[str, ...]:
        return self.outputs + self.prescribed


@dataclass(frozen=True)
class Recipe:
    """Variables by role, their units, grid, time step, features, statistics, and what is done with missing values.

    ``units`` and ``statistics`` are of ``variables``: prognostic, diagnostic, prescribed. ``fill`` says what stands for
    missing values of a variable, in its units; ``mask_channels`` which variables tell the model where they have values;
    ``sum_over_step`` which are summed over each step. ``relief`` [H, W], height of the surface in metres, and
    ``land_mask`` [H, W] are None where the data set has none. All fields are on the tile of this process of ``mesh``.
    ``whole`` is the recipe on the whole globe, on the process of each globe that writes checkpoints.
    """

    roles: Roles
    units: tuple[str, ...]
    grid: Grid
    step: TimeStep
    features: tuple[str, ...]
    statistics: Statistics
    fill: Mapping[str, float] = field(default_factory=dict)
    mask_channels: tuple[str, ...] = ()
    sum_over_step: tuple[str, ...] = ()
    relief: np.ndarray | None = None
    relief_scale: tuple[float, float] = (0.0, 1.0)  # mean and spread over the globe
    land_mask: np.ndarray | None = None
    mesh: ProcessMesh = field(default_factory=ProcessMesh)
    whole: Recipe | None = None

    def __post_init__(self) -> None:
        check_features(self.features)
        for name in MAPS:
            if name in self.features and getattr(self, name) is None:
                raise DataError(
                    f"data.features asks for {name!r} but data.{name} names no file; set it or drop the feature"
                )
        check_options(self.roles, fill=self.fill, mask_channels=self.mask_channels, sum_over_step=self.sum_over_step)

    @property
    def variables(self) -> tuple[str, ...]:
        """All that is read: prognostic, diagnostic, prescribed."""
        return self.roles.variables

    @property
    def outputs(self) -> tuple[str, ...]:
        """All that the model forecasts: prognostic, diagnostic."""
        return self.roles.outputs

    @property
    def state_channels(self) -> int:
        """Channels that go in and come out."""
        return len(self.roles.prognostic)

    @property
    def out_channels(self) -> int:
        return len(self.outputs)

    @property
    def feature_channels(self) -> int:
        told = sum(FEATURES[name].channels(self) for name in self.features)
        return told + len(self.roles.prescribed) + len(self.mask_channels)

    @property
    def in_channels(self) -> int:
        """Channels that enter the model: the prognostic state, then the features, prescribed variables and masks."""
        return self.state_channels + self.feature_channels

    @cached_property
    def tile(self) -> Decomposition:
        return Decomposition(self.grid, self.mesh)

    @property
    def longitudes(self) -> np.ndarray:
        """Radians east, of the tile's columns   [W]"""
        return self.grid.longitudes[self.tile.columns]

    @property
    def standardised_relief(self) -> np.ndarray:
        """Mean 0 and spread 1 over the globe's area   [H, W]"""
        assert self.relief is not None  # __post_init__ refuses the feature without its field
        mean, spread = self.relief_scale
        return (self.relief - mean) / (spread if spread > 0 else 1.0)

    @property
    def filled_outputs(self) -> bool:
        """Whether some variable that comes out has missing values."""
        return any(name in self.fill for name in self.outputs)

    def normalised(self, fields: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fields [..., V, H, W] in their units, NaN where missing, normalised and filled; and where they have one."""
        valid = np.ones(fields.shape, bool)
        if self.fill:
            fields = fields.copy()
            for name, value in self.fill.items():
                values = fields[..., self.variables.index(name), :, :]
                valid[..., self.variables.index(name), :, :] = ~np.isnan(values)
                values[np.isnan(values)] = value
        return self.statistics.normalise(fields), valid

    def feature_fields(self, now: np.datetime64, target: np.datetime64) -> np.ndarray:
        """The features for a step from ``now`` to ``target``   [F, H, W] float32"""
        shape = self.tile.tile_shape
        blocks = [FEATURES[name].fields(self, now, target) for name in self.features]
        filled = [np.broadcast_to(block, (len(block), *shape)) for block in blocks]
        return np.concatenate([np.zeros((0, *shape)), *filled]).astype(np.float32)

    def inputs(
        self, normalised: np.ndarray, valid: np.ndarray, now: np.datetime64, target: np.datetime64
    ) -> np.ndarray:
        """All that enters beside the state: features, prescribed variables at ``now``, masks   [F, H, W] float32

        ``normalised`` and ``valid`` [V, H, W] are the fields at ``now``, as ``normalised`` gives them.
        """
        masks = [valid[self.variables.index(name)][None] for name in self.mask_channels]
        prescribed = normalised[self.out_channels :]
        return np.concatenate([self.feature_fields(now, target), prescribed, *masks]).astype(np.float32)

    def climatology(self, time: np.datetime64) -> np.ndarray:
        """Normalised climatology of the month of ``time``; ``DataError`` for one without   [V', H, W] float32"""
        field = self.baseline(time)
        if np.isnan(field).any():
            raise DataError(
                f"the training period has no time in the month of {np.datetime_as_string(time, 'D')}, so there is no "
                f"climatology for it; lengthen data.splits.train or drop 'climatology' from data.features"
            )
        return field

    def baseline(self, time: np.datetime64) -> np.ndarray:
        """Normalised climatology of the month of ``time``, NaN for a month without   [V', H, W] float32"""
        field = self.statistics.month_climatology(time)
        for name, value in self.fill.items():
            if name in self.outputs:
                v = self.outputs.index(name)
                one = np.broadcast_to(np.float32(value), (v + 1, 1, 1))
                never = np.isnan(field[v]) & ~np.isnan(field[v]).all()
                field[v][never] = self.statistics.normalise(one)[v, 0, 0]
        return field

    def cut(self, mesh: ProcessMesh) -> Recipe:
        """This recipe of the whole globe on the tile of one process of ``mesh``."""
        tile = Decomposition(self.grid, mesh)
        held = {name: getattr(self, name) for name in MAPS if getattr(self, name) is not None}
        maps: Any = {name: array[tile.rows, tile.columns] for name, array in held.items()}
        months = self.statistics.climatology
        statistics = replace(
            self.statistics, climatology=None if months is None else months[..., tile.rows, tile.columns]
        )
        return replace(self, mesh=mesh, statistics=statistics, whole=self if mesh.place == 0 else None, **maps)

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
        """Of the whole globe: plain numbers, strings and tensors, as ``torch.load(weights_only=True)`` accepts.

        Without the climatology where the model is not told it, as it would be most of a checkpoint. Empty on processes
        that write none.
        """
        if self.mesh.globe_size > 1:
            return {} if self.whole is None else self.whole.to_dict()
        told = {} if "climatology" in self.features else {"climatology": None}
        arrays = {**vars(self.statistics), **told, **{name: getattr(self, name) for name in MAPS}}
        tensors = {name: None if array is None else torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return {
            **{name: list(names) for name, names in asdict(self.roles).items()},
            "units": list(self.units),
            "grid": asdict(self.grid),
            "step": asdict(self.step),
            "features": list(self.features),
            "fill": dict(self.fill),
            "mask_channels": list(self.mask_channels),
            "sum_over_step": list(self.sum_over_step),
            "relief_scale": list(self.relief_scale),
            "statistics": {name: tensors[name] for name in vars(self.statistics)},
            **{name: tensors[name] for name in MAPS},
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Recipe:
        def array(tensor: torch.Tensor | None) -> np.ndarray | None:
            return None if tensor is None else tensor.numpy()

        tuples = ("units", "features", "mask_channels", "sum_over_step", "relief_scale")
        arguments: dict[str, Any] = {name: tuple(stored[name]) for name in tuples}
        arguments |= {name: array(stored[name]) for name in MAPS}
        statistics: Any = {name: array(tensor) for name, tensor in stored["statistics"].items()}
        return cls(
            roles=Roles(*(tuple(stored[role]) for role in ("prognostic", "diagnostic", "prescribed"))),
            grid=Grid(**stored["grid"]),
            step=TimeStep(**stored["step"]),
            statistics=Statistics(**statistics),
            fill=dict(stored["fill"]),
            **arguments,
        )


def check_features(features: Sequence[str]) -> None:
    """``DataError`` for a feature that there is not."""
    for name in features:
        if name not in FEATURES:
            raise DataError(f"unknown feature {name!r} in data.features; choose among {', '.join(FEATURES)}")


def check_options(roles: Roles, **options: Sequence[str] | Mapping[str, float]) -> None:
    """``DataError`` for an option of data that names a variable which is not read, or a mask of one without gaps."""
    for option, names in options.items():
        unknown = [name for name in names if name not in roles.variables]
        if unknown:
            raise DataError(f"data.{option} names {', '.join(unknown)}, which is none of {', '.join(roles.variables)}")
    whole = [name for name in options.get("mask_channels", ()) if name not in options.get("fill", ())]
    if whole:
        raise DataError(f"data.mask_channels names {', '.join(whole)}, which data.fill does not; add it there")
