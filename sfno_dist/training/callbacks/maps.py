"""Pictures of what a model forecasts, as it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import xarray as xr
from torch import Tensor

from sfno_dist.comm import whole
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
        forecast_there, truth = ([_whole(one.cpu().float(), recipe) for one in field] for field in fields)
        if trainer.is_global_zero:
            times = batch["times"][0].cpu().numpy().astype("datetime64[ns]")
            globe = recipe.whole or recipe
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"epoch_{trainer.current_epoch}.png"
            pair = [_dataset(values, times, globe) for values in (forecast_there, truth)]
            forecast_maps(pair[0], pair[1], globe, path, steps=len(times) - 1)


def _whole(fields: Tensor, recipe: Recipe) -> list[np.ndarray]:
    """Tiles [V, H, W] put together on the first process of the globe   V x [nlat, nlon]"""
    return [field.numpy() for field in whole(fields, recipe.tile, at=[0] * len(fields)).values()]


def _dataset(fields: list[list[np.ndarray]], times: np.ndarray, recipe: Recipe) -> xr.Dataset:
    values = [np.stack(times_of_one) for times_of_one in zip(*fields, strict=True)]
    variables = zip(recipe.outputs, recipe.units, values, strict=False)
    return xr.Dataset(
        {name: (("time", "lat", "lon"), field, {"units": units}) for name, units, field in variables},
        {"time": times},
    )
