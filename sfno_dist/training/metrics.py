"""Scores over a whole split, accumulated batch by batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class AreaWeightedRMSE(Metric):
    """sqrt of the mean over samples and area of the squared error, for each variable   [V]

    The mean is taken over times before the root, as WeatherBench2 does (S. Rasp et al., 2024, equation 2).
    """

    is_differentiable = False
    higher_is_better = False
    squared_error: Tensor
    samples: Tensor

    def __init__(self, variables: int, shares: Tensor) -> None:
        """``shares`` [nlat, 1]: of the globe's area, ``Grid.area_shares``."""
        super().__init__()
        self.shares = shares.double()
        self.add_state("squared_error", torch.zeros(variables, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Fields [B, V, nlat, nlon]."""
        error = prediction.double() - target.double()
        self.squared_error += (error.square() * self.shares.to(error.device)).sum((-2, -1)).sum(0)
        self.samples += len(error)

    def compute(self) -> Tensor:
        return (self.squared_error / self.samples).sqrt()


def skill(rmse: Tensor, reference: Tensor) -> Tensor:
    """1 - MSE / MSE of the reference: 1 is perfect, 0 no better (A. Murphy, Monthly Weather Review 116, 1988)."""
    return 1.0 - (rmse / reference).square()
