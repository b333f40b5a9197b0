"""What a checkpoint holds beside the weights, so that it is enough for a forecast."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfno_dist import models
from sfno_dist.data.errors import DataError
from sfno_dist.data.recipe import Recipe
from sfno_dist.geometry import Grid

KEY = "sfno_dist"
FORMAT = 2
MODEL_PREFIX = "model."  # of the model's weights in the module's state dict


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A model in evaluation mode with the recipe of its data."""

    model: nn.Module
    recipe: Recipe
    data_paths: list[str]


def contents(model_settings: dict[str, Any], recipe: Recipe, data_paths: list[str]) -> dict[str, Any]:
    """Plain numbers, strings and tensors that ``load`` needs to rebuild the model."""
    return {"format": FORMAT, "model": model_settings, "recipe": recipe.to_dict(), "data_paths": data_paths}


def build_model(settings: dict[str, Any], recipe: Recipe) -> nn.Module:
    """The model that ``settings`` names (a class of ``sfno_dist.models``), sized to the recipe's data.

    ``settings``: ``name``, ``latent_grid`` (kind, nlat, nlon) and further arguments of the class.
    """
    arguments = dict(settings)
    name, latent = arguments.pop("name"), arguments.pop("latent_grid")
    latent_grid = Grid(**latent, first_longitude=recipe.grid.first_longitude)  # meridians line up at column 0
    arguments |= {"mesh": recipe.mesh, "state_channels": recipe.state_channels}
    return model_class(name)(recipe.in_channels, recipe.out_channels, recipe.grid, latent_grid, **arguments)


def model_class(name: str) -> Callable[..., nn.Module]:
    """The class of ``sfno_dist.models`` of that name; ``DataError`` lists those there are."""
    if name not in models.__all__:
        raise DataError(f"unknown model {name!r}; choose among {', '.join(models.__all__)}")
    return getattr(models, name)


def load(path: str | Path) -> LoadedCheckpoint:
    """Reads a checkpoint of ours onto the CPU. ``DataError``, one line, for one that cannot be used."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such checkpoint file")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise DataError(f"{path}: not a readable checkpoint ({str(error).splitlines()[0][:120]})") from error
    if not isinstance(stored, dict) or KEY not in stored:
        raise DataError(f"{path}: not a checkpoint of sfno_dist (it has no {KEY!r} part); give one that train.py wrote")
    ours = stored[KEY]
    if ours["format"] != FORMAT:
        raise DataError(f"{path}: checkpoint format {ours['format']}, this version reads {FORMAT}; upgrade sfno_dist")
    recipe = Recipe.from_dict(ours["recipe"])
    model = build_model(ours["model"], recipe)
    prefixed = stored["state_dict"].items()
    model.load_state_dict({k.removeprefix(MODEL_PREFIX): v for k, v in prefixed if k.startswith(MODEL_PREFIX)})
    return LoadedCheckpoint(model.eval(), recipe, ours["data_paths"])
