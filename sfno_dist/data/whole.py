"""Fields of all tiles put together on the process that writes checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sfno_dist.comm import whole
from sfno_dist.data.recipe import MAPS, Recipe
from sfno_dist.mesh import ProcessMesh


def with_whole(recipe: Recipe) -> Recipe:
    """With the recipe of the whole globe on the process that writes checkpoints; all processes call this."""
    if recipe.mesh.globe_size == 1:
        return recipe
    maps: Any = {name: _gathered(getattr(recipe, name), recipe) for name in MAPS if getattr(recipe, name) is not None}
    by_month: Any = []
    if "climatology" in recipe.features and recipe.statistics.climatology is not None:
        by_month = [_gathered(month, recipe) for month in recipe.statistics.climatology]
    if recipe.mesh.place > 0:
        return recipe
    months = np.stack(by_month) if by_month else None
    statistics = replace(recipe.statistics, climatology=months)
    return replace(recipe, whole=replace(recipe, mesh=ProcessMesh(), statistics=statistics, **maps))


def _gathered(array: np.ndarray, recipe: Recipe) -> np.ndarray | None:
    """A field [..., H, W] of the tiles put together on the first process of the globe, None on others."""
    fields = torch.from_numpy(array).flatten(0, -3) if array.ndim > 2 else torch.from_numpy(array)[None]
    found = whole(fields, recipe.tile, at=[0] * len(fields))
    if recipe.mesh.place > 0:
        return None
    return torch.stack(list(found.values())).reshape(*array.shape[:-2], *recipe.grid.shape).numpy()
