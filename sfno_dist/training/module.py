"""The Lightning module: one step of a model, its loss, its scores and what its checkpoints hold."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from sfno_dist.data.recipe import Recipe
from sfno_dist.layers import Randomness
from sfno_dist.training import checkpoint as checkpoints
from sfno_dist.training.losses import area_weighted_mse
from sfno_dist.training.metrics import AreaWeightedRMSE
from sfno_dist.training.report import score_table

logger = logging.getLogger(__name__)
FORECASTS = ("model", "persistence", "climatology")
NORMALISED = "normalised"  # the model's error in normalised units, whose mean square is the loss


class ForecastModule(lightning.LightningModule):
    """Trains ``model`` to predict the change over one step of the normalised state.

    Args:
        model: [B, recipe.in_channels, nlat, nlon] -> [B, recipe.out_channels, nlat, nlon]: the change of the state,
            then the diagnostic variables.
        recipe: of the data; with ``model_settings`` it makes the checkpoint complete in itself.
        optimizer: from parameter groups to a torch optimizer.
        warmup: share of all steps in which the learning rate rises to its full value; it then falls as a cosine.
        data_paths: where the data were, for a forecast that names none.
        seed: of what the model draws in training.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        model_settings: dict[str, Any],
        optimizer: Callable[[Iterable], torch.optim.Optimizer],
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
        self.shares = torch.from_numpy(recipe.grid.area_shares[recipe.tile.rows]).float()
        self.scores: dict[str, AreaWeightedRMSE] = nn.ModuleDict(
            {name: AreaWeightedRMSE(recipe.out_channels, self.shares) for name in (*FORECASTS, NORMALISED)}
        )  # type: ignore[assignment]

    def forward(self, state: Tensor, features: Tensor) -> Tensor:
        """All that comes out, one step later; what goes in is its first channels   [B, V, nlat, nlon]"""
        return one_step(self.model, self.recipe, state, features)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_index: int) -> None:
        """Tells the model what to draw: nothing of it is left over from the step before, so runs resume anywhere."""
        micro_batch = batch_index % self.trainer.accumulate_grad_batches
        randomness: Randomness = self.model.randomness  # type: ignore[assignment]
        randomness.at(self.seed, self.trainer.global_step, micro_batch=micro_batch, samples=batch["number"])

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        states, features = batch["state"], batch["features"]
        prediction = self(states[:, 0], features[:, 0])
        valid = batch["valid"][:, 1] if "valid" in batch else None
        loss = area_weighted_mse(
            prediction, states[:, 1], self.shares.to(self.device), valid=valid, weight=batch["weight"],
            mesh=self.recipe.mesh,
        )  # fmt: skip
        self.log("train/loss", loss, prog_bar=True, batch_size=len(states))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self._score(batch, "validation")

    def test_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self._score(batch, "test")

    def _score(self, batch: dict[str, Tensor], split: str) -> None:
        now, target = batch["state"][:, 0], batch["state"][:, 1]
        prediction = self(now, batch["features"][:, 0])
        counted = {"valid": batch["valid"][:, 1] if "valid" in batch else None, "weight": batch["weight"]}
        self.scores[NORMALISED].update(prediction, target, **counted)
        physical = self.recipe.statistics.physical
        for name, forecast in zip(FORECASTS, (prediction, now, batch["climatology"][:, 0]), strict=True):
            self.scores[name].update(physical(forecast.double()), physical(target.double()), **counted)

    def on_validation_epoch_end(self) -> None:
        self._report("validation")

    def on_test_epoch_end(self) -> None:
        self._report("test")

    def _report(self, split: str) -> None:
        """Logs the RMSE of each variable in its units and prints it beside the baselines."""
        rmse = {name: metric.compute().cpu() for name, metric in self.scores.items()}
        for metric in self.scores.values():
            metric.reset()
        self.log(f"{split}/loss", rmse.pop(NORMALISED).square().mean(), prog_bar=True)
        for name, values in rmse.items():
            self.log_dict({f"{split}/rmse_{v}_{name}": x for v, x in zip(self.recipe.outputs, values, strict=True)})
        if not self.trainer.sanity_checking:
            title = "test" if split == "test" else f"{split}, epoch {self.current_epoch}"
            logger.info(score_table(rmse, self.recipe, title))

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.requires_grad and p.ndim > 1]
        vectors = [p for p in self.parameters() if p.requires_grad and p.ndim <= 1]
        # Biases and norm weights have no reason to be small.
        optimizer = self.make_optimizer([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(steps, round(self.warmup * steps)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[checkpoints.KEY] = checkpoints.contents(self.model_settings, self.recipe, self.data_paths)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoints.check_fits(checkpoint, self.model_settings, self.recipe)


def one_step(model: nn.Module, recipe: Recipe, state: Tensor, features: Tensor) -> Tensor:
    """The normalised fields one step later, from normalised ones   [B, V, nlat, nlon]

    ``state`` [B, V or fewer, nlat, nlon] begins with the prognostic variables, to which the model adds their change;
    diagnostic ones it makes anew.
    """
    carried = state[:, : recipe.state_channels]
    out = model(torch.cat([carried, features], dim=1))
    if not recipe.roles.diagnostic:
        return carried + out
    return torch.cat([carried + out[:, : recipe.state_channels], out[:, recipe.state_channels :]], dim=1)


def warmup_cosine(steps: int, warmup_steps: int) -> Callable[[int], float]:
    """Factor on the learning rate: rising line over ``warmup_steps``, then half a cosine down to 0 at ``steps``."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, steps - warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))

    return factor
