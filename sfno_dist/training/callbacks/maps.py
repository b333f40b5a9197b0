"""Pictures of what a model forecasts, as it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import xarray as xr
from torch import Tensor

from sfno_dist.comm import sum_on_cpu
from sfno_dist.data.recipe import Recipe
from sfno_dist.training.plot import forecast_maps


class ForecastMaps(lightning.Callback):
    """After each validation ``folder``/epoch_N.png: forecast, truth and difference of its first sample's last step.

    The tiles come together on the first process, which draws.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_validation_batch_end(
        self,
        trainer: lightning.Trainer,
        module: Any,
        outputs: Any,
        batch: dict[str, Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx > 0 or trainer.sanity_checking:
            return
        recipe: Recipe = module.recipe
        states, forecast = batch["state"][0].double(), outputs["forecast"][0].double()
        if "valid" in batch:
            forecast, states = (torch.where(batch["valid"][0, -len(x) :], x, torch.nan) for x in (forecast, states))
        fields = [recipe.statistics.physical(x) for x in (torch.cat([states[:1], forecast]), states)]
        forecast_there, truth = (_whole(field.cpu().float(), recipe) for field in fields)
        if trainer.is_global_zero:
            times = batch["times"][0].cpu().numpy().astype("datetime64[ns]")
            whole = recipe.whole or recipe
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"epoch_{trainer.current_epoch}.png"
            forecast_maps(_dataset(forecast_there, times, whole), _dataset(truth, times, whole), whole, path)


def _whole(fields: Tensor, recipe: Recipe) -> np.ndarray:
    """Tiles [..., H, W] put together   [..., nlat, nlon]"""
    tile = recipe.tile
    globe = torch.zeros(*fields.shape[:-2], *recipe.grid.shape)
    globe[..., tile.rows, tile.columns] = fields
    return sum_on_cpu(globe, recipe.mesh, over=("globe",)).numpy()


def _dataset(fields: np.ndarray, times: np.ndarray, recipe: Recipe) -> xr.Dataset:
    variables = enumerate(zip(recipe.outputs, recipe.units, strict=False))
    return xr.Dataset(
        {name: (("time", "lat", "lon"), fields[:, v], {"units": units}) for v, (name, units) in variables},
        {"time": times},
    )
