"""Each score against another implementation of it: the package ``scores``, xarray, or the written-out sum."""

import numpy as np
import pytest
import xarray as xr

from sfno_dist import Grid
from sfno_dist.scores import definitions

GRIDS = [Grid("equiangular", 19, 36), Grid("equiangular-offset", 18, 36), Grid("legendre-gauss", 16, 31)]
MEMBERS = 5


def fields(grid: Grid, *, gaps: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ensemble [M, H, W], truth and climatology [H, W]; with gaps, NaN over a fifth of the globe."""
    rng = np.random.default_rng(1)
    climatology = 250.0 + 30.0 * np.sin(grid.colatitudes)[:, None] + np.zeros(grid.shape)
    truth = climatology + rng.standard_normal(grid.shape)
    members = climatology + 0.5 * (truth - climatology) + 0.2 + rng.standard_normal((MEMBERS, *grid.shape))
    if gaps:
        gone = rng.random(grid.shape) < 0.2
        truth[gone], members[:, gone] = np.nan, np.nan
    return members, truth, climatology


def arrays(grid: Grid, *values: np.ndarray) -> list[xr.DataArray]:
    """On latitude and longitude, as other packages take them."""
    axes = {"lat": grid.latitudes_degrees, "lon": grid.longitudes_degrees}
    return [xr.DataArray(x, axes if x.ndim == 2 else None, ("member", "lat", "lon")[3 - x.ndim :]) for x in values]


def weatherbench_weights(grid: Grid, region: str) -> xr.DataArray:
    """Rasp et al. 2024, equation 1, from latitudes alone."""
    south, north = definitions.REGIONS[region]
    latitudes = np.radians(90.0) - grid.colatitudes
    edges = np.concatenate([[np.pi / 2], (latitudes[1:] + latitudes[:-1]) / 2, [-np.pi / 2]])
    areas = np.sin(edges[:-1]) - np.sin(edges[1:])
    inside = (grid.latitudes_degrees >= south) & (grid.latitudes_degrees <= north)
    return xr.DataArray(np.where(inside, areas / areas.mean(), 0.0), {"lat": grid.latitudes_degrees}, "lat")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("gaps", [False, True], ids=["whole", "gaps"])
def test_errors_and_crps_are_those_of_the_package_scores(grid, gaps):
    continuous = pytest.importorskip("scores.continuous")
    probability = pytest.importorskip("scores.probability")
    members, truth, climatology = fields(grid, gaps=gaps)
    weights = definitions.region_weights(grid)
    found = definitions.error_scores(members.mean(0), truth, weights, climatology)
    found |= definitions.ensemble_scores(members, truth, weights)
    forecast, observed, ensemble = arrays(grid, members.mean(0), truth, members)
    ensemble = ensemble.assign_coords(lat=observed.lat, lon=observed.lon)
    for r, region in enumerate(definitions.REGIONS):
        chosen = {"weights": weatherbench_weights(grid, region), "reduce_dims": ["lat", "lon"]}
        expected = {
            "mse": continuous.mse(forecast, observed, **chosen),
            "mae": continuous.mae(forecast, observed, **chosen),
            "bias": continuous.additive_bias(forecast, observed, **chosen),
            "crps": probability.crps_for_ensemble(ensemble, observed, "member", method="fair", **chosen),
        }
        for name, value in expected.items():
            assert found[name][r] == pytest.approx(float(value), rel=1e-10), (name, region)


@pytest.mark.parametrize("gaps", [False, True], ids=["whole", "gaps"])
def test_correlation_and_variance_are_xarrays_weighted_means(gaps):
    grid = GRIDS[0]
    members, truth, climatology = fields(grid, gaps=gaps)
    weights = definitions.region_weights(grid)
    found = definitions.error_scores(members.mean(0), truth, weights, climatology)
    found |= definitions.ensemble_scores(members, truth, weights)
    forecast, observed = arrays(grid, members.mean(0) - climatology, truth - climatology)
    for r, region in enumerate(definitions.REGIONS):

        def mean(field, region=region):
            return float(field.weighted(weatherbench_weights(grid, region)).mean())

        correlation = mean(forecast * observed) / np.sqrt(mean(forecast**2) * mean(observed**2))
        assert found["acc"][r] == pytest.approx(correlation, rel=1e-10)
        (variance,) = arrays(grid, members.var(0, ddof=1))
        assert found["variance"][r] == pytest.approx(mean(variance), rel=1e-10)
        assert found["coverage"][r] == pytest.approx(mean(observed.notnull().astype(float)), rel=1e-12)


def test_crps_by_the_double_sum_and_the_normal_distribution():
    grid, rng = Grid("equiangular-offset", 6, 400), np.random.default_rng(3)
    members, truth = rng.standard_normal((8, *grid.shape)), rng.standard_normal(grid.shape)
    weights = definitions.region_weights(grid)
    distances = np.abs(members[:, None] - members[None]).sum((0, 1)) / (2 * 8 * 7)
    expected = definitions.region_mean(np.abs(members - truth).mean(0) - distances, weights)
    found = definitions.ensemble_scores(members, truth, weights)["crps"]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    # E|X - Y| - E|X - X'| / 2 = 1 / sqrt(pi) for X, X' and Y of one normal distribution, whatever the ensemble's size
    assert found[0] == pytest.approx(1.0 / np.sqrt(np.pi), abs=0.03)


def test_regions_share_their_common_rows_and_cover_the_globe():
    weights = definitions.region_weights(Grid("equiangular", 19, 36))  # rows at 90, 80, ... -90
    assert [(row > 0).sum() for row in weights] == [19, 8, 5, 8]
    assert weights[0].sum() == pytest.approx(2.0)
    np.testing.assert_allclose(weights[0], np.maximum(np.maximum(weights[1], weights[2]), weights[3]))


@pytest.mark.parametrize("nlon", [36, 31])
def test_spectra_sum_to_the_mean_square_of_each_row(nlon):
    """Parseval, as WeatherBench 2 states it: sum_k S_k = C / W sum_l f_l^2."""
    grid = Grid("equiangular-offset", 12, nlon)
    field = np.random.default_rng(2).standard_normal((3, *grid.shape)) + 2.0
    circumference = 2.0 * np.pi * definitions.EARTH_RADIUS * np.sin(grid.colatitudes)
    for row in (0, 5):
        only = np.zeros((1, 12))
        only[0, row] = 1.0
        power = definitions.zonal_spectrum(field, grid, only)
        assert power.shape == (3, 1, nlon // 2 + 1)
        expected = circumference[row] * (field[:, row] ** 2).mean(-1)
        np.testing.assert_allclose(power.sum(-1)[:, 0], expected, rtol=1e-12)


def test_a_wave_has_its_power_at_its_wavenumber_and_rows_with_gaps_are_left_out():
    grid = Grid("equiangular-offset", 12, 36)
    field = 3.0 * np.cos(4.0 * grid.longitudes) + np.zeros(grid.shape)
    field[2, 7] = np.nan
    weights = definitions.region_weights(grid)
    power = definitions.zonal_spectrum(field, grid, weights)[0]
    rows = np.delete(np.arange(12), 2)
    circumference = 2.0 * np.pi * definitions.EARTH_RADIUS * np.sin(grid.colatitudes)
    expected = 4.5 * (weights[0] * circumference)[rows].sum() / weights[0, rows].sum()
    assert power[4] == pytest.approx(expected, rel=1e-12)
    assert np.abs(np.delete(power, 4)).max() < 1e-9 * power[4]


def test_what_has_no_value_anywhere_has_no_score():
    grid = Grid("equiangular", 9, 16)
    nothing, weights = np.full(grid.shape, np.nan), definitions.region_weights(grid)
    scores = definitions.error_scores(np.zeros(grid.shape), nothing, weights, np.zeros(grid.shape))
    assert all(np.isnan(scores[name]).all() for name in ("mse", "mae", "bias", "acc"))
    assert (scores["coverage"] == 0).all()
    # Climatology has no anomaly, so it has no correlation; neither a warning nor a number says otherwise.
    same = definitions.error_scores(np.ones(grid.shape), np.zeros(grid.shape), weights, np.ones(grid.shape))
    assert np.isnan(same["acc"]).all()
