"""Statistics over the training period against NumPy on the whole array."""

import numpy as np
import pytest

from sfno_dist import Grid
from sfno_dist.data.statistics import Statistics

GRID = Grid("legendre-gauss", 8, 16)
TIMES = np.arange("1990-01", "1993-01", dtype="datetime64[M]").astype("datetime64[ns]")


def fields() -> np.ndarray:
    """[36, 2, 8, 16]: a temperature in kelvin and a large geopotential, where float32 sums would lose digits."""
    noise = np.random.default_rng(0).standard_normal((36, 2, *GRID.shape))
    return (np.array([280.0, 5e5])[:, None, None] + np.array([10.0, 30.0])[:, None, None] * noise).astype(np.float32)


def statistics_of(array: np.ndarray, indices: np.ndarray) -> Statistics:
    return Statistics.over(TIMES, array.__getitem__, indices=indices, grid=GRID, variables=("t", "z"))


def test_mean_and_spread_are_weighed_by_area_and_blind_to_other_times():
    array, training = fields(), np.arange(24)
    array[24:] = np.nan  # validation and test must not be looked at
    statistics = statistics_of(array, training)
    weights = np.broadcast_to(GRID.cell_areas[:, None], (24, *GRID.shape))
    for v in range(2):
        values = array[training, v].astype(np.float64)
        mean = np.average(values, weights=weights)
        assert statistics.mean[v] == pytest.approx(mean, rel=1e-7)
        assert statistics.std[v] == pytest.approx(np.sqrt(np.average((values - mean) ** 2, weights=weights)), rel=1e-5)


def test_climatology_is_the_mean_of_each_month():
    array = fields()
    climatology = statistics_of(array, np.arange(36)).climatology
    np.testing.assert_allclose(climatology, array.reshape(3, 12, 2, *GRID.shape).mean(0, dtype=np.float64), rtol=1e-6)


def test_a_month_without_training_times_has_no_climatology():
    statistics = statistics_of(fields(), np.array([0, 1, 2]))
    assert np.isfinite(statistics.month_climatology(np.datetime64("2001-03-15"))).all()
    assert np.isnan(statistics.month_climatology(np.datetime64("2001-04-15"))).all()


def test_normalising_is_undone_by_denormalising():
    array = fields()
    statistics = statistics_of(array, np.arange(36))
    normalised = statistics.normalise(array)
    assert normalised.dtype == np.float32
    assert normalised.mean() == pytest.approx(0.0, abs=0.1) and normalised.std() == pytest.approx(1.0, abs=0.1)
    np.testing.assert_allclose(statistics.denormalise(normalised), array, rtol=1e-6)


def test_a_constant_variable_is_named_and_stays_finite():
    array = fields()
    array[:, 1] = 7.0
    with pytest.warns(UserWarning, match="z: constant"):
        statistics = statistics_of(array, np.arange(36))
    assert np.all(statistics.normalise(array)[:, 1] == 0.0)
