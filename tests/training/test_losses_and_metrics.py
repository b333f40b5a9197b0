"""Area-weighted loss and scores against NumPy and against published baselines."""

import math

import numpy as np
import pytest
import torch

from sfno_dist import Grid
from sfno_dist.training.losses import Objective, area_means, mean_loss
from sfno_dist.training.metrics import AreaWeightedScores, MeanLoss, skill
from sfno_dist.training.module import warmup_cosine

GRID = Grid("equiangular", 13, 24)
SHARES = torch.from_numpy(GRID.area_shares).float()


AREA = np.broadcast_to(GRID.cell_areas[:, None], GRID.shape)
POINTWISE = {
    "mse": lambda e: e**2,
    "l1": np.abs,
    "huber": lambda e: np.where(np.abs(e) < 1, e**2 / 2, np.abs(e) - 0.5),
}


def test_each_variable_has_its_loss_over_area():
    prediction, target = 2.0 * torch.randn(2, 3, 2, 3, *GRID.shape)
    means = area_means(prediction, target, SHARES, losses=("huber", "mse", "l1"))
    for place in np.ndindex(3, 2, 3):
        points = POINTWISE[("huber", "mse", "l1")[place[2]]]((prediction - target).numpy()[place])
        assert float(means[place]) == pytest.approx(np.average(points, weights=AREA), rel=1e-5)


def test_losses_of_uneven_tiles_add_up_to_the_loss_of_the_globe():
    a, b = torch.randn(2, 1, 2, *GRID.shape)
    tiles = [(slice(0, 3), slice(0, 24)), (slice(3, 13), slice(0, 5)), (slice(3, 13), slice(5, 24))]
    parts = sum(area_means(a[..., r, c], b[..., r, c], SHARES[r], losses=("l1", "mse")) for r, c in tiles)
    torch.testing.assert_close(parts, area_means(a, b, SHARES, losses=("l1", "mse")))


def test_what_variables_and_levels_count():
    objective = Objective(weights={"z": 2.0, "z500": 6.0, "t2m": 3.0}, level_weights={850: 0.5})
    weights = objective.weights_of(["t2m", "u10", "z500", "z850", "t_850"]).numpy()
    np.testing.assert_allclose(weights, np.array([3, 1, 6, 2 * 0.5, 0.5]) / np.mean([3, 1, 6, 1, 0.5]))
    assert Objective(loss="l1", loss_of={"z": "mse", "z850": "huber"}).losses_of(["z500", "z850", "u10"]) == (
        "mse", "huber", "l1",
    )  # fmt: skip
    means, weight = torch.rand(4, 3, 5), torch.tensor([1.0, 0.0, 2.0, 1.0])
    expected = np.average(np.average(means.numpy(), axis=2, weights=weights).mean(1), weights=weight)
    assert float(mean_loss(means, torch.from_numpy(weights), weight)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "spectral"}, "unknown loss 'spectral' in optim.objective; choose among mse, l1, huber"),
        ({"loss_of": {"q": "mse"}}, "loss_of names q; the variables are t2m, z500"),
        ({"weights": {"t2m": -1.0}}, "at least 0, got -1.0"),
        ({"weights": {"t": 1.0}}, "weights names t; the"),
        ({"level_weights": {700: 1.0}}, r"level_weights names \[700\] hPa; the variables have 500"),
        ({"weights": {"t2m": 0, "z500": 0}}, "every variable the weight 0"),
    ],
)
def test_objectives_that_there_cannot_be_are_refused(settings, words):
    def use():
        objective = Objective(**settings)
        return objective.losses_of(["t2m", "z500"]), objective.weights_of(["t2m", "z500"])

    with pytest.raises(ValueError, match=words):
        use()


def test_scores_are_those_of_numpy_batch_by_batch():
    forecast, target, climatology = torch.randn(3, 5, 2, 2, *GRID.shape)
    valid = torch.rand(5, 2, 2, *GRID.shape) > 0.2
    target[~valid] = torch.nan
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    metric = AreaWeightedScores((2, 2), SHARES)
    for batch in (slice(0, 2), slice(2, 4), slice(4, 5)):  # an uneven last batch counts by its samples
        metric.update(
            forecast[batch], target[batch], climatology[batch], valid=valid[batch], weight=weight[batch]
        )  # fmt: skip
    scores = metric.compute()
    for t, v in np.ndindex(2, 2):
        f, o, c = (x[:4, t, v].double().numpy() for x in (forecast, target, climatology))
        there = valid[:4, t, v].numpy()
        areas = np.broadcast_to(AREA, there.shape)
        error = (f - o)[there]
        assert float(scores["rmse"][t, v]) == pytest.approx(math.sqrt(np.average(error**2, weights=areas[there])))
        assert float(scores["bias"][t, v]) == pytest.approx(np.average(error, weights=areas[there]))
        correlations = []
        for n in range(4):
            here = there[n]
            x, y, w = (f - c)[n, here], (o - c)[n, here], AREA[here]
            correlations.append(np.sum(w * x * y) / math.sqrt(np.sum(w * x * x) * np.sum(w * y * y)))
        assert float(scores["acc"][t, v]) == pytest.approx(np.mean(correlations))


def test_the_mean_loss_counts_samples_not_batches():
    metric = MeanLoss()
    metric.update(torch.tensor([1.0, 2.0, 6.0]), torch.ones(3))
    metric.update(torch.tensor([7.0, 100.0]), torch.tensor([1.0, 0.0]))
    assert float(metric.compute()) == pytest.approx(4.0)


def test_skill_is_one_when_perfect_and_zero_when_equal():
    reference = torch.tensor([2.0, 2.0, 2.0])
    assert skill(torch.tensor([0.0, 2.0, 1.0]), reference).tolist() == pytest.approx([1.0, 0.0, 0.75])


def test_learning_rate_rises_on_a_line_and_falls_as_a_cosine():
    factor = warmup_cosine(100, 10)
    assert [factor(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert factor(10) == pytest.approx(1.0) and factor(55) == pytest.approx(0.5) and factor(100) == pytest.approx(0.0)
    assert warmup_cosine(4, 0)(0) == 1.0
