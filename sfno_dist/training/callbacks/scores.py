"""Scores of validation and test beside persistence and climatology."""

from __future__ import annotations

import logging
from typing import Any

import lightning
from torch import Tensor

from sfno_dist.training.metrics import AreaWeightedScores
from sfno_dist.training.report import score_table

logger = logging.getLogger(__name__)
FORECASTS = ("model", "persistence", "climatology")


class Scores(lightning.Callback):
    """Logs RMSE, bias and anomaly correlation of each variable in its units, and prints them as tables.

    ``validation/rmse_t2m_model`` is of one step; ``validation/rmse_t2m_model_step3`` of the third step of a rollout,
    where ``data.rollout_steps`` of the split is longer than one. The same on every process.
    """

    def __init__(self) -> None:
        self.scores: dict[str, AreaWeightedScores] = {}

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: dict[str, Tensor], *place: int
    ) -> None:
        self._update(module, outputs["forecast"], batch)

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: dict[str, Tensor], *place: int) -> None:
        self._update(module, outputs["forecast"], batch)

    def on_validation_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._report(trainer, module, "validation")

    def on_test_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._report(trainer, module, "test")

    def _update(self, module: Any, forecast: Tensor, batch: dict[str, Tensor]) -> None:
        states, valid = batch["state"].double(), batch.get("valid")
        if not self.scores:
            shape, mesh = (forecast.shape[1], forecast.shape[2]), module.recipe.mesh
            for name in FORECASTS:
                self.scores[name] = AreaWeightedScores(shape, module.shares, mesh=mesh).to(forecast.device)
        physical = module.recipe.statistics.physical
        target, climatology = physical(states[:, 1:]), physical(batch["climatology"].double())
        persistence = physical(states[:, :1]).expand_as(target)
        fields = (physical(forecast.double()), persistence, climatology)
        for name, field in zip(FORECASTS, fields, strict=True):
            self.scores[name].update(
                field, target, climatology, valid=None if valid is None else valid[:, 1:], weight=batch["weight"]
            )

    def _report(self, trainer: lightning.Trainer, module: Any, split: str) -> None:
        computed = {name: metric.compute() for name, metric in self.scores.items()}
        self.scores.clear()  # the next split may have other lead times
        recipe = module.recipe
        for name, scores in computed.items():
            # The climatology has no anomalies from itself.
            for score in ("rmse", "bias") if name == "climatology" else ("rmse", "bias", "acc"):
                for step, values in enumerate(scores[score].float(), start=1):
                    lead = "" if step == 1 else f"_step{step}"
                    named = zip(recipe.outputs, values, strict=True)
                    module.log_dict({f"{split}/{score}_{variable}_{name}{lead}": x for variable, x in named})
        if trainer.sanity_checking or not trainer.is_global_zero or not computed:
            return
        title = "test" if split == "test" else f"{split}, epoch {trainer.current_epoch}"
        steps = len(computed["model"]["rmse"])
        for step in sorted({1, steps}):
            there = {name: {s: x[step - 1].cpu() for s, x in of.items()} for name, of in computed.items()}
            logger.info(score_table(there, recipe, title, steps=step))
