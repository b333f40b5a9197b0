"""What a model is told beside the state: where a point lies, the hour, the season, the sun. One table of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sfno_dist.data.solar import cos_zenith, day_phase, year_phase

if TYPE_CHECKING:
    from sfno_dist.data.recipe import Recipe


@dataclass(frozen=True)
class Feature:
    """``fields(recipe, now, target)`` gives ``channels(recipe)`` fields on the recipe's tile   [F, H or 1, W or 1]

    ``now`` and ``target`` are datetime64: the start and the end of the step that the model is to make.
    """

    channels: Callable[[Recipe], int]
    fields: Callable[[Recipe, np.datetime64, np.datetime64], np.ndarray]


def _position(recipe: Recipe, now: np.datetime64, target: np.datetime64) -> np.ndarray:
    colatitudes, longitudes = recipe.grid.colatitudes[recipe.tile.rows, None], recipe.longitudes[None]
    north = np.broadcast_to(np.cos(colatitudes), recipe.tile.tile_shape)
    ring = np.sin(colatitudes)
    return np.stack([north, ring * np.cos(longitudes), ring * np.sin(longitudes)])


def _year(recipe: Recipe, now: np.datetime64, target: np.datetime64) -> np.ndarray:
    phase = year_phase(target)
    return np.array([np.cos(phase), np.sin(phase)])[:, None, None]


def _day(recipe: Recipe, now: np.datetime64, target: np.datetime64) -> np.ndarray:
    phase = day_phase(target, recipe.longitudes)[None]
    return np.stack([np.cos(phase), np.sin(phase)])


def _sun(recipe: Recipe, now: np.datetime64, target: np.datetime64) -> np.ndarray:
    return cos_zenith(target, recipe.grid, rows=recipe.tile.rows, columns=recipe.tile.columns)[None]


def _climatology(recipe: Recipe, now: np.datetime64, target: np.datetime64) -> np.ndarray:
    return np.concatenate([recipe.climatology(now), recipe.climatology(target)])


FEATURES: dict[str, Feature] = {
    # sines and cosines of latitude and longitude
    "position": Feature(lambda recipe: 3, _position),
    # height of the surface, standardised
    "relief": Feature(lambda recipe: 1, lambda recipe, *_: recipe.standardised_relief[None]),
    # share of land of each cell
    "land_mask": Feature(lambda recipe: 1, lambda recipe, *_: recipe.land_mask[None]),
    # cosine and sine of the target time's place in the year
    "year_phase": Feature(lambda recipe: 2, _year),
    # cosine and sine of the local mean solar time at the target
    "day_phase": Feature(lambda recipe: 2, _day),
    # cosine of the solar zenith angle at the target time
    "cos_zenith": Feature(lambda recipe: 1, _sun),
    # means of the training years for the months of now and of the target, of each variable that comes out
    "climatology": Feature(lambda recipe: 2 * len(recipe.outputs), _climatology),
}
