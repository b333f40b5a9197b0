"""Statistics over the training period against NumPy on the whole array."""

import numpy as np
import pytest
import torch

from sfno_dist import Decomposition, Grid, ProcessMesh
from sfno_dist.data import DataError
from sfno_dist.data.statistics import Moments, Statistics, measure

GRID = Grid("legendre-gauss", 8, 16)
TIMES = np.arange("1990-01", "1993-01", dtype="datetime64[M]").astype("datetime64[ns]")
WEIGHTS = np.broadcast_to(GRID.cell_areas[:, None], GRID.shape)


def fields() -> np.ndarray:
    """[36, 2, 8, 16]: a temperature in kelvin and a large geopotential, where float32 sums would lose digits."""
    noise = np.random.default_rng(0).standard_normal((36, 2, *GRID.shape))
    return (np.array([280.0, 5e5])[:, None, None] + np.array([10.0, 30.0])[:, None, None] * noise).astype(np.float32)


def statistics_of(array: np.ndarray, indices: np.ndarray, **options) -> Statistics:
    tile = Decomposition(GRID, ProcessMesh())
    return measure(array.__getitem__, TIMES, indices=indices, tile=tile, variables=("t", "z"), **options)


def test_mean_and_spread_are_weighed_by_area_and_blind_to_other_times():
    array, training = fields(), np.arange(24)
    array[24:] = np.nan  # validation and test must not be looked at
    statistics = statistics_of(array, training)
    for v in range(2):
        values = array[training, v].astype(np.float64)
        mean = np.average(values, weights=np.broadcast_to(WEIGHTS, values.shape))
        spread = np.sqrt(np.average((values - mean) ** 2, weights=np.broadcast_to(WEIGHTS, values.shape)))
        assert statistics.mean[v] == pytest.approx(mean, rel=1e-14)
        assert statistics.std[v] == pytest.approx(spread, rel=1e-12)


def test_the_change_over_one_step_is_that_of_pairs_alone():
    array = fields()
    following = np.where(np.arange(36) % 7 < 6, np.arange(36) + 1, -1)  # the others have a gap behind them
    following[-1] = -1
    change = statistics_of(array, np.arange(36), following=following).change_std
    starts = np.flatnonzero(following >= 0)
    apart = array[starts + 1].astype(np.float64) - array[starts]
    for v in range(2):
        weights = np.broadcast_to(WEIGHTS, apart[:, v].shape)
        mean = np.average(apart[:, v], weights=weights)
        assert change[v] == pytest.approx(np.sqrt(np.average((apart[:, v] - mean) ** 2, weights=weights)), rel=1e-6)


def test_missing_values_count_for_nothing():
    array = fields()
    gaps = np.random.default_rng(1).random((36, *GRID.shape)) < 0.3
    gaps[:, 2, 3] = True
    array[:, 0][gaps] = np.nan
    statistics = statistics_of(array, np.arange(36), gaps=True)
    weights = np.broadcast_to(WEIGHTS, gaps.shape)[~gaps]
    values = array[:, 0][~gaps].astype(np.float64)
    assert statistics.mean[0] == pytest.approx(np.average(values, weights=weights), rel=1e-13)
    present = ~gaps[::12]
    with np.errstate(invalid="ignore"):
        expected = np.where(present, array[::12, 0], 0.0).sum(0, dtype=np.float64) / present.sum(0)
    np.testing.assert_allclose(statistics.climatology[0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_merged_are_the_whole(parts):
    array = fields()
    weights = GRID.area_shares
    whole, merged = Moments(2), Moments(2)
    whole.add(array, weights)
    for times in np.array_split(np.arange(36), parts):
        merged.add(array[times], weights)
    for name in ("weight", "mean", "squares"):
        np.testing.assert_allclose(getattr(merged, name), getattr(whole, name), rtol=1e-13)


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


def test_a_log_is_taken_of_precipitation_and_undone():
    array = fields()
    array[:, 0] = np.maximum(array[:, 0] - 280.0, 0.0) * 1e-4
    statistics = statistics_of(array, np.arange(36), log_epsilon=np.array([1e-5, 0.0]))
    values = np.log1p(array[:, 0].astype(np.float64) / 1e-5)
    mean = np.average(values, weights=np.broadcast_to(WEIGHTS, values.shape))
    assert statistics.mean[0] == pytest.approx(mean, rel=1e-6)
    normalised = statistics.normalise(array)
    np.testing.assert_allclose(normalised[:, 0], (values - mean) / statistics.std[0], atol=1e-5)
    np.testing.assert_allclose(statistics.denormalise(normalised), array, rtol=1e-5, atol=1e-9)
    assert statistics.physical(torch.full((2, 8, 16), -9.0))[0].min() == 0.0  # never below none
    np.testing.assert_allclose(statistics.climatology[0, 0], array[::12, 0].mean(0), rtol=1e-5)  # of the amounts


def test_a_constant_variable_is_named_and_stays_finite():
    array = fields()
    array[:, 1] = 7.0
    with pytest.warns(UserWarning, match="z: constant"):
        statistics = statistics_of(array, np.arange(36))
    assert np.all(statistics.normalise(array)[:, 1] == 0.0)


def test_a_variable_without_any_value_is_refused():
    array = fields()
    array[:, 1] = np.nan
    with pytest.raises(DataError, match=r"z: no value in the training period"):
        statistics_of(array, np.arange(36), gaps=True)
