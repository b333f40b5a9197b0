"""What a checkpoint holds beside the weights, so that it is enough for a forecast."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sfno_dist import models
from sfno_dist.data.errors import DataError
from sfno_dist.data.recipe import Recipe
from sfno_dist.geometry import Grid
from sfno_dist.mesh import ProcessMesh

KEY = "sfno_dist"
FORMAT = 2
# Settings of a model that change nothing of what its weights mean.
FREE = ("backend", "exchange", "recompute_blocks", "input_noise", "dropout", "path_dropout")
SAME_STATISTICS = 1e-3  # of the spread: far above what a layout changes in their last digits
MODEL_PREFIX = "model."  # of the model's weights in the module's state dict


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used here. One line naming the file, and the remedy."""


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


def load(path: str | Path, mesh: ProcessMesh | None = None) -> LoadedCheckpoint:
    """Reads a checkpoint of ours onto the CPU, for the tile of one process of ``mesh``.

    ``CheckpointError``, one line, for one that cannot be used.
    """
    stored = read(Path(path))
    try:
        ours = stored[KEY]
        recipe = Recipe.from_dict(ours["recipe"])
        if mesh is not None and mesh.size > 1:
            recipe = recipe.cut(mesh)
        settings = {**ours["model"], "backend": None}  # that of the device at hand
        model = build_model(settings, recipe)
        prefixed = stored["state_dict"].items()
        model.load_state_dict({k.removeprefix(MODEL_PREFIX): v for k, v in prefixed if k.startswith(MODEL_PREFIX)})
        return LoadedCheckpoint(model.eval(), recipe, ours["data_paths"])
    except (KeyError, TypeError, RuntimeError) as error:
        what = str(error).splitlines()[0][:120]
        raise CheckpointError(
            f"{path}: what it holds does not fit together ({what}); it is damaged, or of another version of sfno_dist"
        ) from error


def grids(path: str | Path) -> tuple[Grid, Grid]:
    """That of the fields of a checkpoint, and that of its blocks; ``CheckpointError`` as for ``load``."""
    ours = read(Path(path))[KEY]
    return Grid(**ours["recipe"]["grid"]), Grid(**ours["model"]["latent_grid"])


def read(path: Path) -> dict[str, Any]:
    """All that a checkpoint of ours holds, on the CPU. ``CheckpointError`` for anything else."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint file")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = (str(error) or "it is empty").splitlines()[0][:120]
        raise CheckpointError(f"{path}: not a readable checkpoint ({reason})") from error
    check_format(stored, path)
    return stored


def check_format(stored: Any, path: str | Path | None) -> None:
    """``CheckpointError`` where ``stored`` is not what this version of ``train.py`` writes."""
    if not isinstance(stored, dict) or KEY not in stored:
        raise CheckpointError(
            f"{path}: not a checkpoint of sfno_dist (it has no {KEY!r} part); give one that train.py wrote"
        )
    found = stored[KEY]["format"]
    if found != FORMAT:
        raise CheckpointError(f"{path}: checkpoint format {found}, this version reads {FORMAT}; upgrade sfno_dist")


def check_fits(
    stored: dict[str, Any], path: str | Path | None, *, model_settings: dict[str, Any], recipe: Recipe
) -> None:
    """``CheckpointError``, the same on every process, where a training with these settings cannot go on from it."""
    check_format(stored, path)
    ours = stored[KEY]
    defaults = {
        name: p.default for name, p in inspect.signature(model_class(model_settings["name"])).parameters.items()
    }
    then, now = ({**defaults, **settings} for settings in (ours["model"], model_settings))
    facts = _facts(recipe)
    pairs = [(f"model.{name}", then.get(name), now.get(name)) for name in sorted(then.keys() | now.keys())]
    pairs += [(f"data: {name}", ours["recipe"][name], facts[name]) for name in facts]
    for name, was, is_now in pairs:
        if was != is_now and name.removeprefix("model.") not in FREE:
            raise CheckpointError(
                f"{path}: {name} was {was} in the checkpoint and is {is_now} now, so the training cannot go on "
                f"from it; use the same settings, or train from the start"
            )
    measured = ours["recipe"]["statistics"]
    mean, std = measured["mean"].numpy(), measured["std"].numpy()
    shift = np.abs(mean - recipe.statistics.mean) / std + np.abs(recipe.statistics.std / std - 1.0)  # [V]
    if (shift > SAME_STATISTICS).any():
        raise CheckpointError(
            f"{path}: mean and spread of {recipe.variables[int(shift.argmax())]} over the training period are not "
            f"those of the checkpoint, so the training cannot go on from it; use the same data and data.splits.train"
        )


def _facts(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe gives the model's channels their meaning, as ``Recipe.to_dict`` has it."""
    lists = ("units", "features", "mask_channels", "sum_over_step")
    return {
        **{role: list(names) for role, names in asdict(recipe.roles).items()},
        **{name: list(getattr(recipe, name)) for name in lists},
        "grid": asdict(recipe.grid),
        "step": asdict(recipe.step),
        "fill": dict(recipe.fill),
    }
