"""The Lightning DataModule: from files and dates to batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import lightning
import numpy as np
from torch.utils.data import DataLoader

from sfno_dist.data.errors import DataError
from sfno_dist.data.open import open_static
from sfno_dist.data.recipe import Recipe
from sfno_dist.data.regrid import area_mean
from sfno_dist.data.samples import FieldReader, ForecastSamples
from sfno_dist.data.statistics import Statistics
from sfno_dist.data.timeline import TimeStep, period, sequences
from sfno_dist.geometry import Grid

SPLITS = ("train", "validation", "test")


class WeatherDataModule(lightning.LightningDataModule):
    """Pairs of fields one step apart, from any files that ``open_dataset`` reads.

    Args:
        paths: file, zarr folder, glob, or a list of them.
        variables: names, in the order of the model's channels.
        splits: ``train``, ``validation`` and ``test``, each a first and last date; they may not overlap. A sample
            belongs to the split of its target: the field it starts from may be the last one of the split before.
        step: such as "6 hours"; "auto" takes the spacing of the data.
        features: see ``recipe.FEATURES``.
        relief: file and variable of the height of the surface, put onto the grid of the data; or None.
        grid: that the data must be on; None takes it from the files.

    ``recipe`` describes the data once ``setup`` has run. Raises ``DataError``.
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        variables: str | Sequence[str],
        *,
        splits: Mapping[str, Sequence[str]],
        step: str = "auto",
        features: Sequence[str] = ("position", "year_phase"),
        relief: Mapping[str, str] | None = None,
        grid: Grid | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.reader = FieldReader(paths, variables)
        self.step, self.features, self.relief, self.expected_grid = step, tuple(features), relief, grid
        self.batch_size, self.num_workers = batch_size, num_workers
        self.periods = _periods(splits)
        self.samples: dict[str, ForecastSamples] = {}

    def setup(self, stage: str | None = None) -> None:
        """Opens the files, takes the statistics from the training period, and finds the samples of each split."""
        if self.samples:
            return
        times = self.reader.times
        self.recipe = self._recipe(times)
        pairs = sequences(times, self.recipe.step, 1)
        for split, (first, last) in self.periods.items():
            targets = times[pairs[:, 1]]
            chosen = pairs[(targets >= first) & (targets <= last)]
            if len(chosen) == 0:
                raise DataError(
                    f"{self.reader.source}: no two times {self.recipe.step} apart end in the {split} period "
                    f"{first.astype('datetime64[D]')} to {last.astype('datetime64[D]')}; the data run from "
                    f"{times[0].astype('datetime64[D]')} to {times[-1].astype('datetime64[D]')}"
                )
            self.samples[split] = ForecastSamples(self.reader, self.recipe, chosen)

    def _recipe(self, times: np.ndarray) -> Recipe:
        dataset = self.reader.dataset
        grid = Grid.from_coordinates(dataset.lat.values, dataset.lon.values)
        if self.expected_grid is not None and grid != self.expected_grid:
            raise DataError(
                f"{self.reader.source}: the data are on grid {grid}, the configuration names {self.expected_grid}; "
                f"use grid=auto or the grid of the data"
            )
        step = TimeStep.of(times) if self.step == "auto" else TimeStep.parse(self.step)
        first, last = self.periods["train"]
        training = np.flatnonzero((times >= first) & (times <= last))
        if len(training) == 0:
            raise DataError(
                f"{self.reader.source}: no time lies in the training period {first.astype('datetime64[D]')} to "
                f"{last.astype('datetime64[D]')}; the data run from {times[0].astype('datetime64[D]')} to "
                f"{times[-1].astype('datetime64[D]')}"
            )
        relief = None if self.relief is None else area_mean(open_static(**self.relief), grid)
        variables = self.reader.variables
        return Recipe(
            variables=variables,
            units=tuple(str(dataset[name].attrs.get("units", "")) for name in variables),
            grid=grid,
            step=step,
            features=self.features,
            statistics=Statistics.over(times, self.reader, indices=training, grid=grid, variables=variables),
            relief=relief,
        )

    @property
    def summary(self) -> str:
        """Variables, grid, step and number of samples, in one line."""
        counts = ", ".join(f"{len(samples)} {split}" for split, samples in self.samples.items())
        return f"{', '.join(self.recipe.variables)} on {self.recipe.grid}, step {self.recipe.step}, samples: {counts}"

    def train_dataloader(self) -> DataLoader:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader("validation", shuffle=False)

    def test_dataloader(self) -> DataLoader:
        return self._loader("test", shuffle=False)

    def _loader(self, split: str, *, shuffle: bool) -> DataLoader:
        return DataLoader(
            self.samples[split],
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def _periods(splits: Mapping[str, Sequence[str]]) -> dict[str, tuple[np.datetime64, np.datetime64]]:
    """First and last instant of each split, in order and without overlap."""
    if set(splits) != set(SPLITS):
        raise DataError(f"data.splits needs {', '.join(SPLITS)}, got {', '.join(splits) or 'nothing'}")
    periods = {}
    for split in SPLITS:
        dates = list(splits[split])
        if len(dates) != 2:
            raise DataError(f"data.splits.{split} needs a first and a last date, got {dates}")
        periods[split] = period(dates[0], dates[1], f"data.splits.{split}")
    ordered = sorted(periods.items(), key=lambda item: item[1][0])
    for (earlier, (_, end)), (later, (start, _)) in pairwise(ordered):
        if start <= end:
            raise DataError(f"data.splits: {earlier} and {later} overlap; a period must end before the next begins")
    return periods
