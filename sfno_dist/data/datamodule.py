"""The Lightning DataModule: from files and dates to batches of the tile that this process owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader

from sfno_dist.data.cache import StatisticsCache
from sfno_dist.data.curriculum import Curriculum
from sfno_dist.data.errors import DataError
from sfno_dist.data.failure import has_processes, raise_everywhere, refuse_differences
from sfno_dist.data.ledger import LEDGER
from sfno_dist.data.recipe import Recipe, Roles, check_features, check_options
from sfno_dist.data.regrid import static_on_tile
from sfno_dist.data.sampler import GlobalBatches
from sfno_dist.data.samples import FAILURE, FieldReader, ForecastSamples
from sfno_dist.data.splits import SPLITS, Splits
from sfno_dist.data.statistics import Moments, Statistics, measure
from sfno_dist.data.timeline import TimeStep, sequences
from sfno_dist.data.whole import with_whole
from sfno_dist.geometry import Grid
from sfno_dist.mesh import ProcessMesh


class WeatherDataModule(lightning.LightningDataModule):
    """Sequences of fields one step apart, from any files that ``open_dataset`` reads; see ``ForecastSamples``.

    Args:
        paths: file, zarr folder, glob, or a list of them.
        variables: names that go into the model and come out, in the order of its channels.
        diagnostic: names that come out only. prescribed: names that go in only, and are read at every step.
        splits: ``train``, ``validation`` and ``test``, each a first and last date, without overlap; see ``Splits``.
        step: such as "6 hours"; "auto" takes the spacing of the data.
        rollout_steps: targets of each sample, of all splits or by split; for training also stages [first epoch, steps],
            see ``Curriculum``. ``set_rollout_steps`` changes it.
        features: see ``forcings.FEATURES``.
        relief, land_mask: file and variable of the surface's height in metres and of the share of land, put onto the
            grid of the data; or None.
        fill: what stands for missing values of a variable, in its units. Without it they are an error.
        mask_channels: filled variables of which the model is also told where they have values.
        log_epsilon: variables x, such as precipitation, that become log(1 + x / epsilon), with epsilon in their units.
        sum_over_step: variables accumulated over an interval shorter than the step, to be summed over it.
        change_statistics: also measure the spread of the change over one step.
        statistics_cache: folder that keeps the statistics from run to run; None measures them each time.
        grid: that the data must be on; None takes it from the files.
        batch_size: samples of one step over all data replicas together.
        num_workers: processes that read ahead, for each training process.
        seed: of the order of the training samples.
        mesh: the processes that share the work; each reads its tile of the globe, at the times of its replica.

    ``recipe`` describes the data once ``setup`` has run. Raises ``DataError``, on all processes alike.
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        variables: str | Sequence[str],
        *,
        splits: Mapping[str, Sequence[str]],
        diagnostic: Sequence[str] = (),
        prescribed: Sequence[str] = (),
        step: str = "auto",
        rollout_steps: int | Mapping[str, int | Sequence[Sequence[int]]] = 1,
        features: Sequence[str] = ("position", "year_phase"),
        relief: Mapping[str, str] | None = None,
        land_mask: Mapping[str, str] | None = None,
        fill: Mapping[str, float] | None = None,
        mask_channels: Sequence[str] = (),
        log_epsilon: Mapping[str, float] | None = None,
        sum_over_step: Sequence[str] = (),
        change_statistics: bool = False,
        statistics_cache: str | None = None,
        grid: Grid | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        seed: int = 0,
        mesh: ProcessMesh | None = None,
    ) -> None:
        super().__init__()
        names = (variables,) if isinstance(variables, str) else tuple(variables)
        self.roles = Roles(names, tuple(diagnostic), tuple(prescribed))
        self.fill, self.log_epsilon = dict(fill or {}), dict(log_epsilon or {})
        self.mask_channels, self.sum_over_step = tuple(mask_channels), tuple(sum_over_step)
        check_options(
            self.roles, fill=self.fill, mask_channels=self.mask_channels, sum_over_step=self.sum_over_step,
            log_epsilon=self.log_epsilon,
        )  # fmt: skip
        check_features(features)
        self.mesh = mesh or ProcessMesh()
        self.reader = FieldReader(paths, self.roles.variables, missing=tuple(self.fill), mesh=self.mesh)
        self.step, self.features, self.expected_grid = step, tuple(features), grid
        self.static = {name: source for name, source in (("relief", relief), ("land_mask", land_mask)) if source}
        self.change_statistics, self.statistics_cache = change_statistics, statistics_cache
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self.splits = Splits(splits)
        steps: dict = (
            dict(rollout_steps) if isinstance(rollout_steps, Mapping) else dict.fromkeys(SPLITS, rollout_steps)
        )
        self.rollouts = {split: Curriculum(steps.pop(split, 1), split) for split in SPLITS}
        if steps:
            raise DataError(f"data.rollout_steps names {', '.join(steps)}; the splits are {', '.join(SPLITS)}")
        self.batches: dict[str, GlobalBatches] = {}

    def setup(self, stage: str | None = None) -> None:
        """Opens the files, takes the statistics from the training period, and finds the samples of each split."""
        if self.batches:
            return
        found: dict[str, np.ndarray] = {}
        problem = None
        try:
            self._check_grid()
            self.time_step = TimeStep.of(self.reader.times) if self.step == "auto" else TimeStep.parse(self.step)
            self.reader.sum_over(self.time_step, self.sum_over_step)
            training = self._training_times()
            # Stages that the data are too short for are refused before the first epoch.
            for _, steps in self.rollouts["train"].stages[1:]:
                self._sequences("train", steps)
            found = {split: self._sequences(split, self.rollouts[split].steps(0)) for split in SPLITS}
        except DataError as error:
            problem = str(error)
        raise_everywhere(problem, self.mesh)
        refuse_differences(self.reader.facts(), self.mesh)
        self.recipe = self._recipe(training)
        for split in SPLITS:
            self.batches[split] = GlobalBatches(
                found[split], self.batch_size, replicas=self.mesh.data, replica=self.mesh.data_index, seed=self.seed,
                shuffle=split == "train",
            )  # fmt: skip

    def set_rollout_steps(self, steps: int, split: str = "train") -> None:
        """Gives the samples of a split ``steps`` targets; those of a training that runs from its next epoch on.

        The trainer then loads its data anew, as longer rollouts make fewer batches. ``DataError`` where the split has
        no such sample, and for another split than ``train`` while a training runs.
        """
        running = self.trainer is not None and self.trainer.training
        if running and split != "train":
            raise DataError(f"rollouts of the {split} split change between trainings only; set data.rollout_steps")
        curriculum = Curriculum(steps, split)
        if self.batches:
            self._sequences(split, steps)  # the error of too few times now, not in an epoch's time
        self.rollouts[split] = curriculum
        if running:
            self.trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[union-attr]
        elif self.batches:
            self._begin_stage(split)

    def training_batches(self, epochs: int) -> list[int]:
        """Number of batches in each of the first ``epochs`` epochs of training, whatever the stage that is on."""
        curriculum = self.rollouts["train"]
        samples = {steps: len(self._sequences("train", steps)) for _, steps in curriculum.stages}
        return [-(-samples[curriculum.steps(epoch)] // self.batch_size) for epoch in range(epochs)]

    def _begin_stage(self, split: str, epoch: int = 0) -> None:
        """Makes the samples of a split as long as those of ``epoch`` are."""
        steps = self.rollouts[split].steps(epoch)
        if self.batches[split].sequences.shape[1] != steps + 1:
            self.batches[split].sequences = self._sequences(split, steps)

    def _check_grid(self) -> None:
        grid = self.reader.tile.grid
        if self.expected_grid is not None and grid != self.expected_grid:
            raise DataError(
                f"{self.reader.source}: the data are on grid {grid}, the configuration names {self.expected_grid}; "
                f"use grid=auto or the grid of the data"
            )

    def _sequences(self, split: str, steps: int) -> np.ndarray:
        runs = sequences(self.reader.times, self.time_step, steps)
        chosen = self.splits.choose(runs[self.reader.complete[runs].all(axis=1)], self.reader.dates, split)
        if len(chosen) == 0:
            count = "two" if steps == 1 else str(steps + 1)
            raise DataError(
                f"{self.reader.source}: no {count} times {self.time_step} apart end in the {self.splits.text(split)}; "
                f"{self._extent()}"
            )
        return chosen

    def _training_times(self) -> np.ndarray:
        training = np.flatnonzero(self.splits.within(self.reader.dates, "train") & self.reader.complete)
        if len(training) == 0:
            period = self.splits.text("train").replace("train", "training")
            raise DataError(f"{self.reader.source}: no time lies in the {period}; {self._extent()}")
        return training

    def _extent(self) -> str:
        first, last = self.reader.dates[[0, -1]].astype("datetime64[D]")
        return f"the data run from {first} to {last}"

    def _recipe(self, training: np.ndarray) -> Recipe:
        """On the tile of this process; where the others do not exist, cut from the recipe of one process."""
        on_paper = self.mesh.size > 1 and not has_processes(self.mesh)
        reader = self.reader
        if on_paper:
            reader = FieldReader(reader.paths, reader.variables, missing=reader.missing)
            reader.sum_over(self.time_step, self.sum_over_step)
        maps, scale, problem = {}, (0.0, 1.0), None
        try:
            maps = {name: static_on_tile(**source, tile=reader.tile) for name, source in self.static.items()}
        except DataError as error:
            problem = str(error)
        raise_everywhere(problem, reader.mesh)
        if "relief" in maps:
            moments = Moments(1)
            moments.add(maps["relief"][None, None], reader.tile.grid.area_shares[reader.tile.rows])
            moments = moments.merged(reader.mesh)
            scale = (float(moments.mean[0]), float(moments.std[0]))
        attributes = [reader.dataset[name].attrs for name in reader.variables]
        recipe = Recipe(
            roles=self.roles,
            units=tuple(str(found.get("units", "")) for found in attributes),
            grid=reader.tile.grid,
            step=self.time_step,
            features=self.features,
            statistics=self._statistics(reader, training),
            fill=self.fill,
            mask_channels=self.mask_channels,
            sum_over_step=self.sum_over_step,
            relief=maps.get("relief"),
            relief_scale=scale,
            land_mask=maps.get("land_mask"),
            mesh=reader.mesh,
        )
        return recipe.cut(self.mesh) if on_paper else with_whole(recipe)

    def _statistics(self, reader: FieldReader, training: np.ndarray) -> Statistics:
        epsilon = np.array([float(self.log_epsilon.get(name, 0.0)) for name in reader.variables])
        if (epsilon < 0).any():
            raise DataError(f"data.log_epsilon must be positive, got {self.log_epsilon}")
        facts = {
            "roles": self.roles, "log_epsilon": sorted(self.log_epsilon.items()), "fill": sorted(self.fill),
            "period": self.splits.periods["train"], "step": self.time_step, "sums": self.sum_over_step,
            "change": self.change_statistics,
        }  # fmt: skip
        cache = StatisticsCache(self.statistics_cache, reader.paths, reader.tile, facts)
        statistics = cache.load()
        if statistics is None:
            statistics = measure(
                reader.read, reader.dates, indices=training, tile=reader.tile, variables=reader.variables,
                outputs=len(self.roles.outputs), log_epsilon=epsilon, gaps=bool(self.fill),
                following=self._following(training) if self.change_statistics else None,
            )  # fmt: skip
            cache.save(statistics)
        return statistics

    def _following(self, training: np.ndarray) -> np.ndarray:
        """For each training time the training time one step later, or -1."""
        pairs = sequences(self.reader.times, self.time_step, 1)
        later = np.full(len(self.reader.times), -1)
        later[pairs[:, 0]] = np.where(np.isin(pairs[:, 1], training), pairs[:, 1], -1)
        return later[training]

    @property
    def summary(self) -> str:
        """Variables, grid, step and number of samples, in one line."""
        counts = ", ".join(f"{len(batches.sequences)} {split}" for split, batches in self.batches.items())
        roles = self.roles
        names = ", ".join(roles.prognostic)
        names += f", diagnostic {', '.join(roles.diagnostic)}" if roles.diagnostic else ""
        names += f", prescribed {', '.join(roles.prescribed)}" if roles.prescribed else ""
        return f"{names} on {self.recipe.grid}, step {self.recipe.step}, samples: {counts}"

    def train_dataloader(self) -> DataLoader:
        if self.trainer is not None:
            # The sampler knows the epoch of a checkpoint before the trainer does, the trainer that of the next one.
            self._begin_stage("train", max(self.trainer.current_epoch, self.batches["train"].epoch))
            to_next = self.rollouts["train"].epochs_to_next(self.trainer.current_epoch)
            self.trainer.reload_dataloaders_every_n_epochs = to_next  # type: ignore[attr-defined]
        return self._loader("train")

    def val_dataloader(self) -> DataLoader:
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader:
        return self._loader("test")

    def _loader(self, split: str) -> DataLoader:
        # The sampler makes whole batches, so Lightning finds it, tells it the epoch, and replaces nothing.
        return DataLoader(
            ForecastSamples(self.reader, self.recipe, scores=split != "train"),
            batch_size=None,
            sampler=self.batches[split],
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            # Of its own: each pass over a loader draws one number, which a resumed training would draw too often.
            generator=torch.Generator(),
            worker_init_fn=LEDGER.of_workers(self.num_workers) if self.num_workers else None,
        )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """``DataError`` on every process where one of them could not read its part of the batch."""
        raise_everywhere(batch.get(FAILURE), self.mesh)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """How much of the epoch the training has used; Lightning keeps it in every checkpoint."""
        if self.trainer is None or not self.batches:
            return {}
        # Batches that were trained on; workers and the loader are further ahead.
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return self.batches["train"].state_dict(progress.processed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on in the epoch, with samples as long as that epoch has them."""
        self._begin_stage("train", state_dict["epoch"])
        self.batches["train"].load_state_dict(state_dict)
