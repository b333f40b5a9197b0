"""Weights averaged over the steps of a training."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import WeightAveraging


class WeightAverage(WeightAveraging):
    """Exponential moving average of the weights: what is scored, kept as best, and forecast with.

    After n steps, average <- d average + (1 - d) weights with d = min(decay, (1 + n) / (10 + n)), the rule of
    TensorFlow's ``ExponentialMovingAverage``. With d = decay from the start, the first weights, which know nothing,
    would be 0.999**570 = 57 % of the average after a training of 570 steps.

    Lightning's, which mistakes two things. Outside of a fit it would replace the average, just loaded, by the weights
    of the last step; and an error within a validation left the two exchanged.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not isinstance(decay, (int, float)) or not 0.0 <= decay < 1.0:
            raise ValueError(f"the decay of averaged weights is at least 0 and below 1, got {decay!r}")
        super().__init__(use_buffers=False, multi_avg_fn=partial(_average, decay))
        self._exchanged = False

    def _swap_models(self, pl_module: lightning.LightningModule) -> None:
        super()._swap_models(pl_module)
        self._exchanged = not self._exchanged

    def on_load_checkpoint(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            super().on_load_checkpoint(trainer, module, checkpoint)

    def on_validation_epoch_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if trainer.state.fn == "fit":
            super().on_validation_epoch_start(trainer, module)

    def on_validation_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if self._exchanged:
            super().on_validation_epoch_end(trainer, module)

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, module, checkpoint)
        if self._exchanged:  # a signal to save came within a validation
            average, last = checkpoint["current_model_state"], checkpoint["state_dict"]
            checkpoint["state_dict"], checkpoint["current_model_state"] = average, last

    def on_exception(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, exception: BaseException
    ) -> None:
        if self._exchanged:
            self._swap_models(module)


def _average(decay: float, averages: list[torch.Tensor], weights: list[torch.Tensor], steps: torch.Tensor) -> None:
    """The next averages, in place, where ``steps`` are averaged already."""
    share = 1.0 - min(decay, (1.0 + float(steps)) / (10.0 + float(steps)))
    with torch.no_grad():
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight, share)
