"""Samples: sequences of fields exactly one step apart, read when asked for.

Dims: T steps, V variables, F feature channels, H rows, W columns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.utils.data import Dataset

from sfno_dist.data.open import open_dataset
from sfno_dist.data.recipe import Recipe


class FieldReader:
    """Reads the fields of one time from files; opens them once in each process.

    File handles never cross a fork: a DataLoader worker that inherits this object opens the files anew.
    """

    def __init__(self, paths: str | Sequence[str], variables: str | Sequence[str]) -> None:
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        self.variables = (variables,) if isinstance(variables, str) else tuple(variables)
        self._opened: tuple[int, xr.Dataset] | None = None

    @property
    def source(self) -> str:
        """The paths, for messages."""
        return ", ".join(self.paths)

    @property
    def dataset(self) -> xr.Dataset:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), open_dataset(self.paths, self.variables))
        return self._opened[1]

    @property
    def times(self) -> np.ndarray:
        """[time] datetime64[ns]"""
        return self.dataset.time.values

    def __call__(self, index: int) -> np.ndarray:
        """The fields of the time at ``index``   [V, H, W] float32"""
        fields = np.empty((len(self.variables), self.dataset.sizes["lat"], self.dataset.sizes["lon"]), np.float32)
        for row, name in enumerate(self.variables):
            fields[row] = self.dataset[name][index].values
        return fields

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_opened": None}


class ForecastSamples(Dataset):
    """Sample i: the fields at the times ``sequences[i]`` and what the model may know of each step.

    ``state`` [T + 1, V, H, W] normalised; ``features`` [T, F, H, W]; ``climatology`` [T, V, H, W] normalised, of
    the target months; ``times`` [T + 1] int64 nanoseconds since 1970.
    """

    def __init__(self, reader: FieldReader, recipe: Recipe, sequences: np.ndarray) -> None:
        self.reader, self.recipe, self.sequences = reader, recipe, sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        indices = self.sequences[item]
        times = self.reader.times[indices]
        state = self.recipe.statistics.normalise(np.stack([self.reader(int(i)) for i in indices]))
        pairs = list(pairwise(times))
        return {
            "state": torch.from_numpy(state),
            "features": torch.from_numpy(np.stack([self.recipe.feature_fields(now, target) for now, target in pairs])),
            "climatology": torch.from_numpy(
                np.stack([self.recipe.statistics.month_climatology(target) for _, target in pairs])
            ),
            "times": torch.from_numpy(times.astype("datetime64[ns]").astype(np.int64)),
        }
