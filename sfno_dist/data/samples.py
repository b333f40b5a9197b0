"""Samples: sequences of fields exactly one step apart, read when asked for, on the tile of this process.

Dims: B batch, T steps, V variables that come out, F feature channels, H rows and W columns of the tile.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from sfno_dist.data.accumulated import check_accumulations
from sfno_dist.data.calendars import as_gregorian, instants, time_text
from sfno_dist.data.errors import DataError
from sfno_dist.data.fields import Fields
from sfno_dist.data.open import dataset_of, open_sources
from sfno_dist.data.recipe import Recipe
from sfno_dist.data.sampler import Draw
from sfno_dist.data.timeline import TimeStep
from sfno_dist.geometry import Grid
from sfno_dist.mesh import Decomposition, ProcessMesh

FAILURE = "failure"  # the key of a batch that could not be read: its message


class FieldReader:
    """Reads fields from files, of the tile of one process of ``mesh`` alone; by default the whole globe.

    ``missing`` names variables that may lack values, which are then NaN. It may be pickled and forked: the Dataset
    beneath holds no open file.
    """

    def __init__(
        self,
        paths: str | os.PathLike | Sequence[str | os.PathLike],
        variables: str | Sequence[str],
        *,
        missing: Collection[str] = (),
        mesh: ProcessMesh | None = None,
    ) -> None:
        self.paths = [os.fspath(p) for p in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
        self.variables = (variables,) if isinstance(variables, str) else tuple(variables)
        self.missing, self.mesh = tuple(missing), mesh or ProcessMesh()
        self._terms: dict[str, np.ndarray] = {}

    @classmethod
    def of(cls, recipe: Recipe, paths: Sequence[str]) -> FieldReader:
        """For the variables of a recipe, read and summed as for its training."""
        reader = cls(paths, recipe.variables, missing=tuple(recipe.fill), mesh=recipe.mesh)
        recipe.check(reader.dataset, reader.source)
        reader.sum_over(recipe.step, recipe.sum_over_step)
        return reader

    @property
    def source(self) -> str:
        """The paths, for messages."""
        return ", ".join(self.paths)

    @cached_property
    def _opened(self) -> tuple[xr.Dataset, Fields]:
        return dataset_of(open_sources(self.paths), self.variables, missing=self.missing)

    @property
    def dataset(self) -> xr.Dataset:
        return self._opened[0]

    @cached_property
    def _points(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows and columns of the tile."""
        rows, columns = self.tile.rows, self.tile.columns
        return np.arange(rows.start, rows.stop), np.arange(columns.start, columns.stop)

    @cached_property
    def tile(self) -> Decomposition:
        grid = Grid.from_coordinates(self.dataset.lat.values, self.dataset.lon.values)
        return Decomposition(grid, self.mesh)

    @cached_property
    def times(self) -> np.ndarray:
        """[time] datetime64[ns], or cftime dates in the calendar of a model"""
        return self.dataset.time.values

    @cached_property
    def dates(self) -> np.ndarray:
        """The same seasons and hours in the Gregorian calendar   [time] datetime64[ns]"""
        return as_gregorian(self.times)

    @property
    def complete(self) -> np.ndarray:
        """Whether all variables have values, and all terms of their sums   [time]"""
        whole = self.dataset.complete.values
        for terms in self._terms.values():
            whole = whole & (terms >= 0).all(axis=1) & whole[np.maximum(terms, 0)].all(axis=1)
        return whole

    def facts(self) -> dict[str, str]:
        """What must be alike on all processes that share the data, in words."""
        moments, whole = instants(self.times), self.complete
        digest = hashlib.sha256(moments.tobytes() + whole.tobytes()).hexdigest()[:8]
        units = (f"{name} in {self.dataset[name].attrs.get('units', '')!r}" for name in self.variables)
        return {
            "variables": ", ".join(units),
            "grid": str(self.tile.grid),
            "times": f"{len(moments)} from {time_text(self.times[0])} to {time_text(self.times[-1])} ({digest})",
        }

    def sum_over(self, step: TimeStep, names: Collection[str]) -> None:
        """Reads the variables ``names`` as sums over the step that ends at each time.

        ``DataError`` for another one that is a sum over less or more than a step: single values of it would leave out
        or count twice.
        """
        hours = step.stride / 60.0 if step.unit != "months" else None
        for name in self.variables:
            one = self.dataset[[name]]
            interval = one[name].attrs.get("accumulation_hours")
            if hours is None:
                self._refuse_part_of_month(name, interval, step, named=name in names)
            elif name not in names:
                try:
                    check_accumulations(one, hours, self.source)
                except DataError as error:
                    raise DataError(f"{error}; data.sum_over_step=[{name}] sums it") from None
            elif interval is None or hours % interval:
                told = (
                    "does not say over how long it is summed" if interval is None else f"is summed over {interval:g} h"
                )
                raise DataError(f"{self.source}: data.sum_over_step names {name}, which {told}; a step is {hours:g} h")
            else:
                self._terms[name] = self._terms_of(round(hours / interval), interval)

    def _refuse_part_of_month(self, name: str, interval: float | None, step: TimeStep, *, named: bool) -> None:
        if named or (interval is not None and interval < step.count * 27 * 24):
            raise DataError(
                f"{self.source}: {name} is accumulated over {interval or 0:g} h, the step is {step}: sum it by month"
            )

    def _terms_of(self, count: int, interval: float) -> np.ndarray:
        """Which times are summed for each time, -1 for one that is lacking   [time, count]"""
        moments = instants(self.times)
        wanted = moments[:, None] - np.arange(count) * int(interval * 3.6e9)
        found = np.minimum(np.searchsorted(moments, wanted), len(moments) - 1)
        return np.where(moments[found] == wanted, found, -1)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """The tile's fields at some times   [times, variables, H, W] float32"""
        indices = np.asarray(indices)
        if not self._terms:
            return self._values(self.variables, indices)
        fields = np.empty((len(indices), len(self.variables), *self.tile.tile_shape), np.float32)
        single = [v for v, name in enumerate(self.variables) if name not in self._terms]
        if single:
            fields[:, single] = self._values([self.variables[v] for v in single], indices)
        for v, name in enumerate(self.variables):
            if name in self._terms:
                fields[:, v] = self._summed(name, indices)
        return fields

    def _summed(self, name: str, indices: np.ndarray) -> np.ndarray:
        terms = self._terms[name][indices]
        if (terms < 0).any():
            lacking = self.times[indices[int(np.argmax((terms < 0).any(axis=1)))]]
            raise DataError(
                f"{self.source}: {name} at {time_text(lacking)} is a sum over times that the data lack; start later"
            )
        needed = np.unique(terms)
        values = self._values([name], needed)[:, 0]
        return values[np.searchsorted(needed, terms)].sum(axis=1, dtype=np.float64)

    def _values(self, names: Sequence[str], indices: np.ndarray) -> np.ndarray:
        """[times, variables, H, W] float32"""
        return self._opened[1].read(names, indices, *self._points)

    def __call__(self, index: int) -> np.ndarray:
        """The tile's fields at one time   [variables, H, W] float32"""
        return self.read([index])[0]


class ForecastSamples(Dataset):
    """Batches of samples: the fields at the times of each, and what the model may know of each step.

    ``samples[draws]`` holds ``state`` [B, T + 1, V, H, W], normalised and filled, prognostic before diagnostic
    variables; ``features`` [B, T, F, H, W], all that enters beside the state; ``times`` [B, T + 1] int64 nanoseconds
    since 1970; ``weight`` and ``number`` [B] as in ``Draw``; where scores are wanted ``climatology`` [B, T, V, H, W]
    of the targets; and where some of V lack values ``valid`` [B, T + 1, V, H, W] bool. A batch that cannot be read is
    {"failure": message}, so that all processes can stop alike.
    """

    def __init__(self, reader: FieldReader, recipe: Recipe, *, scores: bool = True) -> None:
        self.reader, self.recipe, self.scores = reader, recipe, scores

    def __getitem__(self, draws: Sequence[Draw]) -> dict[str, Any]:
        try:
            return default_collate([self.sample(draw) for draw in draws])
        except DataError as error:
            return {FAILURE: str(error)}

    def sample(self, draw: Draw) -> dict[str, Tensor]:
        """One sample, without the batch dim."""
        recipe, indices = self.recipe, np.asarray(draw.times)
        dates = self.reader.dates[indices]
        fields, valid = recipe.normalised(self._checked(self.reader.read(indices), dates))
        steps = list(enumerate(pairwise(dates)))
        features = np.stack([recipe.inputs(fields[n], valid[n], now, target) for n, (now, target) in steps])
        outputs = recipe.out_channels
        sample = {
            "state": torch.from_numpy(np.ascontiguousarray(fields[:, :outputs])),
            "features": torch.from_numpy(features),
            "times": torch.from_numpy(dates.astype("datetime64[ns]").astype(np.int64)),
            "weight": torch.tensor(draw.weight, dtype=torch.float32),
            "number": torch.tensor(draw.number),
        }
        if self.scores:
            months = [recipe.baseline(target) for _, (_, target) in steps]
            sample["climatology"] = torch.from_numpy(np.stack(months))
        if recipe.filled_outputs:
            sample["valid"] = torch.from_numpy(np.ascontiguousarray(valid[:, :outputs]))
        return sample

    def _checked(self, fields: np.ndarray, dates: np.ndarray) -> np.ndarray:
        """``DataError`` for a variable with a log that is clearly negative."""
        epsilon = self.recipe.statistics.log_epsilon
        for v in np.flatnonzero(epsilon):
            lowest = np.nanmin(fields[:, v], initial=0.0, axis=(1, 2))
            if lowest.min() < -epsilon[v]:
                name, when = self.recipe.variables[v], np.datetime_as_string(dates[int(lowest.argmin())], "s")
                raise DataError(
                    f"{self.reader.source}: {name} is {lowest.min():g} at {when}, which has no log; drop it from "
                    f"data.log_epsilon or mend the file"
                )
        return fields
