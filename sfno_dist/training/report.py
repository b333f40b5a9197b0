"""Scores as a table in the terminal."""

from __future__ import annotations

from torch import Tensor

from sfno_dist.data.recipe import Recipe
from sfno_dist.training.metrics import skill


def score_table(rmse: dict[str, Tensor], recipe: Recipe, title: str) -> str:
    """RMSE of each variable beside persistence and climatology, and the skill against each.

    ``rmse`` holds, for "model" and each baseline, one value per variable in its units.
    """
    baselines = [name for name in rmse if name != "model"]
    head = ["RMSE", "units", "model", *baselines, *(f"skill vs {name}" for name in baselines)]
    rows = [
        [variable, recipe.units[i], _cell(rmse["model"][i], ".4g")]
        + [_cell(rmse[name][i], ".4g") for name in baselines]
        + [_cell(skill(rmse["model"][i], rmse[name][i]), "+.3f") for name in baselines]
        for i, variable in enumerate(recipe.outputs)
    ]
    widths = [max(len(row[c]) for row in [head, *rows]) for c in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    if rmse["climatology"].isnan().any():
        lines.append("(-: the training period lacks the months of some targets, so they have no climatology)")
    return "\n".join([f"\n{title}: one step ({recipe.step}) ahead, skill = 1 - MSE / MSE of the baseline", *lines])


def _cell(value: Tensor, form: str) -> str:
    """A dash for a baseline that the data cannot give: climatology of a month that the training period lacks."""
    return "-" if value.isnan() else format(float(value), form)
