"""The Lightning module: a model rolled out, its loss, and what its checkpoints hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sfno_dist.data.recipe import Recipe
from sfno_dist.layers import Randomness
from sfno_dist.training import checkpoint as checkpoints
from sfno_dist.training.losses import Objective, area_means, mean_loss
from sfno_dist.training.metrics import MeanLoss
from sfno_dist.training.rollout import rollout


class ForecastModule(lightning.LightningModule):
    """Trains ``model`` to predict the change of the normalised state, step after step from its own forecasts.

    Args:
        model: [B, recipe.in_channels, nlat, nlon] -> [B, recipe.out_channels, nlat, nlon]: the change of the state,
            then the diagnostic variables.
        recipe: of the data; with ``model_settings`` it makes the checkpoint complete in itself.
        optimizer: from parameter groups to a torch optimizer.
        objective: the loss of each variable; by default the mean square.
        warmup: share of all steps in which the learning rate rises to its full value; it then falls as a cosine.
        data_paths: where the data were, for a forecast that names none.
        seed: of what the model draws in training.

    Of the last training batch ``train_losses`` [T, V] holds the losses of all processes, by lead time and variable, and
    ``sample_losses`` [B, T, V] those of this one.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        model_settings: dict[str, Any],
        optimizer: Callable[[Iterable], torch.optim.Optimizer],
        objective: Objective | None = None,
        warmup: float = 0.05,
        data_paths: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(warmup, (int, float)) or not 0.0 <= warmup < 1.0:
            raise ValueError(f"optim.warmup is a share of all steps, at least 0 and below 1, got {warmup!r}")
        self.model, self.recipe, self.model_settings = model, recipe, model_settings
        self.make_optimizer, self.warmup, self.data_paths = optimizer, warmup, data_paths or []
        self.seed = seed
        objective = objective or Objective()
        self.losses = objective.losses_of(recipe.outputs)
        self.weights = objective.weights_of(recipe.outputs).float()
        self.shares = torch.from_numpy(recipe.grid.area_shares[recipe.tile.rows]).float()
        self.sample_losses = torch.zeros(0, 1, recipe.out_channels)
        self.train_losses = torch.zeros(1, recipe.out_channels)
        self.mean_loss = MeanLoss(mesh=recipe.mesh)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """All that comes out at each step of a batch, see ``ForecastSamples``   [B, T, V, nlat, nlon]"""
        known = batch["valid"][:, 0] if "valid" in batch else None
        return rollout(self.model, self.recipe, batch["state"][:, 0], batch["features"], known=known)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_index: int) -> None:
        """Tells the model what to draw: nothing of it is left over from the step before, so runs resume anywhere."""
        if self.model.draws:
            micro_batch = batch_index % self.trainer.accumulate_grad_batches
            randomness: Randomness = self.model.randomness  # type: ignore[assignment]
            randomness.at(self.seed, self.trainer.global_step, micro_batch=micro_batch, samples=batch["number"])

    def area_means(self, prediction: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The tile's share of each field's loss   [B, T, V]"""
        valid = batch["valid"][:, 1:] if "valid" in batch else None
        return area_means(
            prediction, batch["state"][:, 1:], self.shares.to(self.device), losses=self.losses, valid=valid,
            mesh=self.recipe.mesh,
        )  # fmt: skip

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        means = self.area_means(self(batch), batch)
        self.sample_losses = means.detach()
        self.train_losses = self._of_all_processes((self.sample_losses * batch["weight"][:, None, None]).mean(0))
        weights = self.weights.to(self.device)
        self.log("train/loss", (self.train_losses * weights).mean(), prog_bar=True, batch_size=len(means))
        return mean_loss(means, weights, batch["weight"])

    def _of_all_processes(self, values: Tensor) -> Tensor:
        """Sum over the tiles of a globe, mean over the replicas."""
        mesh = self.recipe.mesh
        if mesh.size > 1:
            dist.all_reduce(values)
        return values / mesh.data

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> dict[str, Tensor]:
        """``forecast``, normalised, as ``forward`` gives it, for callbacks."""
        return self._judged(batch)

    def test_step(self, batch: dict[str, Tensor], batch_index: int) -> dict[str, Tensor]:
        return self._judged(batch)

    def _judged(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        prediction = self(batch)
        means = self.area_means(prediction, batch)
        self.mean_loss.update((means * self.weights.to(self.device)).mean((1, 2)), batch["weight"])
        return {"forecast": prediction}

    def on_validation_epoch_end(self) -> None:
        self._log_mean_loss("validation")

    def on_test_epoch_end(self) -> None:
        self._log_mean_loss("test")

    def _log_mean_loss(self, split: str) -> None:
        self.log(f"{split}/loss", self.mean_loss.compute().float(), prog_bar=True)
        self.mean_loss.reset()

    def bare_optimizer(self) -> torch.optim.Optimizer:
        """Without the schedule of its learning rate."""
        matrices = [p for p in self.parameters() if p.requires_grad and p.ndim > 1]
        vectors = [p for p in self.parameters() if p.requires_grad and p.ndim <= 1]
        # Biases and norm weights have no reason to be small.
        return self.make_optimizer([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])

    def configure_optimizers(self) -> Any:
        optimizer = self.bare_optimizer()
        steps = training_steps(self.trainer)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(steps, round(self.warmup * steps)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[checkpoints.KEY] = checkpoints.contents(self.model_settings, self.recipe, self.data_paths)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        path = self.trainer.ckpt_path
        checkpoints.check_fits(checkpoint, path, model_settings=self.model_settings, recipe=self.recipe)


def training_steps(trainer: lightning.Trainer) -> int:
    """Optimiser steps of the whole training; Lightning's estimate takes all epochs to be as long as the one at hand."""
    data, epochs = getattr(trainer, "datamodule", None), trainer.max_epochs
    estimate = trainer.estimated_stepping_batches
    if data is None or epochs in (None, -1) or not isinstance(trainer.limit_train_batches, float):
        return int(estimate)
    batches = [int(count * trainer.limit_train_batches) for count in data.training_batches(epochs)]
    steps = sum(-(-count // trainer.accumulate_grad_batches) for count in batches)
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def warmup_cosine(steps: int, warmup_steps: int) -> Callable[[int], float]:
    """Factor on the learning rate: rising line over ``warmup_steps``, then half a cosine down to 0 at ``steps``."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, steps - warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))

    return factor
