"""Scores as a table in the terminal."""

from __future__ import annotations

from torch import Tensor

from sfno_dist.data.recipe import Recipe
from sfno_dist.training.metrics import skill


def score_table(scores: dict[str, dict[str, Tensor]], recipe: Recipe, title: str, *, steps: int = 1) -> str:
    """RMSE of each variable beside persistence and climatology, the skill against each, bias and correlation.

    ``scores`` holds, for "model" and each baseline, "rmse", "bias" and "acc", one value per variable, ``steps`` ahead.
    """
    baselines = [name for name in scores if name != "model"]
    rmse = {name: of["rmse"] for name, of in scores.items()}
    head = ["RMSE", "units", "model", *baselines, *(f"skill vs {name}" for name in baselines)]
    head += ["bias", "ACC", "ACC of persistence"]
    rows = [
        [variable, recipe.units[i], _cell(rmse["model"][i], ".4g")]
        + [_cell(rmse[name][i], ".4g") for name in baselines]
        + [_cell(skill(rmse["model"][i], rmse[name][i]), "+.3f") for name in baselines]
        + [
            _cell(scores["model"]["bias"][i], "+.3g"),
            *(_cell(scores[x]["acc"][i], ".3f") for x in ("model", "persistence")),
        ]
        for i, variable in enumerate(recipe.outputs)
    ]
    widths = [max(len(row[c]) for row in [head, *rows]) for c in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    if rmse["climatology"].isnan().any():
        lines.append("(-: the training period lacks the months of some targets, so they have no climatology)")
    ahead = f"one step ({recipe.step})" if steps == 1 else f"{steps} steps of {recipe.step}"
    return "\n".join([f"\n{title}: {ahead} ahead, skill = 1 - MSE / MSE of the baseline", *lines])


def _cell(value: Tensor, form: str) -> str:
    """A dash for a baseline that the data cannot give: climatology of a month that the training period lacks."""
    return "-" if value.isnan() else format(float(value), form)
