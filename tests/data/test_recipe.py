"""The recipe: features, and the round trip through a checkpoint."""

import dataclasses

import numpy as np
import pytest
import torch
import xarray as xr

from sfno_dist import Grid
from sfno_dist.data import DataError
from sfno_dist.data.forcings import FEATURES
from sfno_dist.data.recipe import Recipe, Roles
from sfno_dist.data.statistics import Statistics
from sfno_dist.data.timeline import TimeStep

GRID = Grid("equiangular", 7, 12)
NOW, TARGET = np.datetime64("1991-01-16", "ns"), np.datetime64("1991-02-15", "ns")


@pytest.fixture
def recipe() -> Recipe:
    rng = np.random.default_rng(0)
    relief = rng.standard_normal(GRID.shape).astype(np.float32)
    mean = float((GRID.area_shares * relief).sum())
    return Recipe(
        roles=Roles(("u", "v")),
        units=("m/s", "m/s"),
        grid=GRID,
        step=TimeStep(1, "months"),
        features=tuple(FEATURES),
        statistics=Statistics(
            np.array([1.0, 2.0]),
            np.array([3.0, 4.0]),
            rng.standard_normal((12, 2, *GRID.shape)).astype(np.float32),
            np.zeros(2),
        ),
        relief=relief,
        relief_scale=(mean, float(np.sqrt((GRID.area_shares * (relief - mean) ** 2).sum()))),
        land_mask=rng.random(GRID.shape).astype(np.float32),
    )


def dataset(recipe: Recipe, **changes) -> xr.Dataset:
    grid = changes.get("grid", recipe.grid)
    return xr.Dataset(
        {
            name: (
                ("time", "lat", "lon"),
                np.zeros((1, *grid.shape), np.float32),
                {"units": changes.get("units", "m/s")},
            )
            for name in changes.get("variables", recipe.variables)
        },
        {"lat": grid.latitudes_degrees, "lon": grid.longitudes_degrees},
    )


def test_feature_channels_are_as_many_as_announced(recipe):
    for names in ([], ["position"], ["relief", "cos_zenith"], list(FEATURES)):
        chosen = dataclasses.replace(recipe, features=tuple(names))
        features = chosen.feature_fields(NOW, TARGET)
        assert features.shape == (chosen.in_channels - 2, *GRID.shape) and features.dtype == np.float32


def test_features_are_what_they_say(recipe):
    features = recipe.feature_fields(NOW, TARGET)
    np.testing.assert_allclose((features[:3] ** 2).sum(0), 1.0, rtol=1e-6)  # points of the unit sphere
    np.testing.assert_allclose(features[0], np.cos(GRID.colatitudes)[:, None].repeat(12, 1), atol=1e-7)
    relief = features[3]
    assert (relief * GRID.cell_areas[:, None]).sum() == pytest.approx(0.0, abs=1e-5)
    assert np.all(np.diff(relief.ravel()[np.argsort(recipe.relief.ravel())]) >= 0)
    assert np.array_equal(features[4], recipe.land_mask)
    assert np.ptp(features[5]) == 0 and np.hypot(features[5], features[6])[0, 0] == pytest.approx(1.0)
    # Midnight UTC: midnight at 0 E, six in the morning at 90 E.
    np.testing.assert_allclose(features[7:9, 0, [0, 3]], [[1, 0], [0, 1]], atol=1e-6)
    climatology = recipe.statistics.denormalise(features[10:14].reshape(2, 2, *GRID.shape))
    np.testing.assert_allclose(climatology, recipe.statistics.climatology[[0, 1]], rtol=1e-5, atol=1e-6)


def test_a_recipe_survives_a_checkpoint_that_is_loaded_with_weights_only(recipe, tmp_path):
    torch.save(recipe.to_dict(), tmp_path / "recipe.pt")
    back = Recipe.from_dict(torch.load(tmp_path / "recipe.pt", weights_only=True))
    for field in ("roles", "units", "grid", "step", "features"):
        assert getattr(back, field) == getattr(recipe, field)
    for name in ("mean", "std", "climatology", "log_epsilon"):
        assert np.array_equal(getattr(back.statistics, name), getattr(recipe.statistics, name))
    assert np.array_equal(back.feature_fields(NOW, TARGET), recipe.feature_fields(NOW, TARGET))


def test_irregular_grids_survive_too(recipe):
    full = Grid("equiangular", 73, 144)
    grid = Grid.from_coordinates(full.latitudes_degrees[:-1], full.longitudes_degrees)
    assert Recipe.from_dict(dataclasses.replace(recipe, grid=grid).to_dict()).grid == grid


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variables": ("u",)}, "needs variable v, the data have u"),
        ({"units": "knots"}, "u is in 'knots', the checkpoint was trained on 'm/s'"),
        ({"grid": Grid("equiangular", 9, 12)}, "equiangular 9 x 12, the checkpoint is for equiangular 7 x 12"),
    ],
)
def test_data_that_do_not_fit_are_refused_with_what_differs(recipe, changes, words):
    recipe.check(dataset(recipe), "a.nc")
    with pytest.raises(DataError, match=f"a.nc: .*{words}"):
        recipe.check(dataset(recipe, **changes), "a.nc")


def test_a_month_without_climatology_is_named_where_it_is_a_feature(recipe):
    climatology = recipe.statistics.climatology.copy()
    climatology[1] = np.nan
    lacking = dataclasses.replace(recipe, statistics=dataclasses.replace(recipe.statistics, climatology=climatology))
    with pytest.raises(DataError, match=r"month of 1991-02-15.*drop 'climatology'"):
        lacking.feature_fields(NOW, TARGET)
    dataclasses.replace(lacking, features=("position",)).feature_fields(NOW, TARGET)


def test_unknown_features_and_missing_relief_are_refused(recipe):
    with pytest.raises(DataError, match=r"unknown feature 'moon'.*choose among position"):
        dataclasses.replace(recipe, features=("moon",))
    with pytest.raises(DataError, match=r"data\.relief"):
        dataclasses.replace(recipe, relief=None)
    with pytest.raises(DataError, match=r"data\.land_mask"):
        dataclasses.replace(recipe, land_mask=None)


def test_a_checkpoint_holds_the_climatology_only_where_the_model_is_told_it(recipe):
    assert recipe.to_dict()["statistics"]["climatology"] is not None
    told = dataclasses.replace(recipe, features=("position",))
    assert Recipe.from_dict(told.to_dict()).statistics.climatology is None
