"""Scores over a whole split, accumulated batch by batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class AreaWeightedRMSE(Metric):
    """sqrt of the mean over samples and area of the squared error, for each variable   [V]

    The mean is taken over times before the root, as WeatherBench2 does (S. Rasp et al., 2024, equation 2), and over the
    points that have values. On tiles of the globe the sums of all processes together are those of the whole.
    """

    is_differentiable = False
    higher_is_better = False
    squared_error: Tensor
    area: Tensor

    def __init__(self, variables: int, shares: Tensor) -> None:
        """``shares`` [nlat, 1]: of the globe's area, the rows of ``Grid.area_shares`` that the fields are on."""
        super().__init__()
        self.shares = shares.double()
        self.add_state("squared_error", torch.zeros(variables, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("area", torch.zeros(variables, dtype=torch.float64), dist_reduce_fx="sum")

    def update(
        self, prediction: Tensor, target: Tensor, *, valid: Tensor | None = None, weight: Tensor | None = None
    ) -> None:
        """Fields [B, V, nlat, nlon]; ``valid`` where the target has values; samples of ``weight`` [B] 0 count not."""
        square = (prediction.double() - target.double()).square()
        shares = self.shares.to(square.device).expand_as(square)
        if valid is not None:
            shares, square = shares * valid, torch.where(valid, square, 0.0)
        if weight is not None:
            real = (weight > 0)[:, None, None, None]
            shares, square = shares * real, torch.where(real, square, 0.0)
        self.squared_error += (square * shares).sum((-2, -1)).sum(0)
        self.area += shares.sum((-2, -1)).sum(0)

    def compute(self) -> Tensor:
        return (self.squared_error / self.area).sqrt()


def skill(rmse: Tensor, reference: Tensor) -> Tensor:
    """1 - MSE / MSE of the reference: 1 is perfect, 0 no better (A. Murphy, Monthly Weather Review 116, 1988)."""
    return 1.0 - (rmse / reference).square()
