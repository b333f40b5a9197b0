"""Area-weighted loss and scores against NumPy and against published baselines."""

import math

import numpy as np
import pytest
import torch

from sfno_dist import Grid
from sfno_dist.training.losses import area_weighted_mse
from sfno_dist.training.metrics import AreaWeightedRMSE, skill
from sfno_dist.training.module import warmup_cosine

GRID = Grid("equiangular", 13, 24)
SHARES = torch.from_numpy(GRID.area_shares).float()


def test_loss_is_the_mean_square_over_area():
    a, b = torch.randn(3, 2, 13, 24), torch.randn(3, 2, 13, 24)
    weights = np.broadcast_to(GRID.cell_areas[:, None], a.shape)
    expected = np.average((a - b).square().numpy(), weights=weights)
    assert float(area_weighted_mse(a, b, SHARES)) == pytest.approx(expected, rel=1e-5)


def test_losses_of_uneven_tiles_add_up_to_the_loss_of_the_globe():
    a, b, shares = torch.randn(1, 2, 13, 24), torch.randn(1, 2, 13, 24), SHARES
    tiles = [(slice(0, 3), slice(0, 24)), (slice(3, 13), slice(0, 5)), (slice(3, 13), slice(5, 24))]
    parts = sum(area_weighted_mse(a[..., r, c], b[..., r, c], shares[r]) for r, c in tiles)
    assert float(parts) == pytest.approx(float(area_weighted_mse(a, b, shares)), rel=1e-6)


def test_rmse_takes_the_mean_over_samples_before_the_root():
    predictions, targets = torch.randn(5, 2, 13, 24), torch.randn(5, 2, 13, 24)
    metric = AreaWeightedRMSE(2, SHARES)
    for batch in (slice(0, 2), slice(2, 4), slice(4, 5)):  # an uneven last batch counts by its samples
        metric.update(predictions[batch], targets[batch])
    weights = np.broadcast_to(GRID.cell_areas[:, None], (5, 13, 24))
    for v in range(2):
        expected = math.sqrt(np.average((predictions - targets).numpy()[:, v] ** 2, weights=weights))
        assert float(metric.compute()[v]) == pytest.approx(expected, rel=1e-6)


def test_skill_is_one_when_perfect_and_zero_when_equal():
    reference = torch.tensor([2.0, 2.0, 2.0])
    assert skill(torch.tensor([0.0, 2.0, 1.0]), reference).tolist() == pytest.approx([1.0, 0.0, 0.75])


def test_learning_rate_rises_on_a_line_and_falls_as_a_cosine():
    factor = warmup_cosine(100, 10)
    assert [factor(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert factor(10) == pytest.approx(1.0) and factor(55) == pytest.approx(0.5) and factor(100) == pytest.approx(0.0)
    assert warmup_cosine(4, 0)(0) == 1.0
