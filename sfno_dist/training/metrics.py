"""Scores over a whole split, accumulated batch by batch.

Dims: B samples, T lead times, V variables.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from sfno_dist.comm import sum_over_globe
from sfno_dist.mesh import ProcessMesh


class AreaWeightedScores(Metric):
    """RMSE, bias and anomaly correlation of each variable at each lead time   [T, V]

    All by area over the points that have values, as WeatherBench2 does (S. Rasp et al., 2024, section 3): the mean of
    the squared error over times before the root, the mean error, and the mean over times of the correlation of a
    field's anomalies from the climatology, which are not centred again. On tiles of a globe and with samples shared
    out among replicas they are those of one process.
    """

    is_differentiable = False
    area: Tensor
    error: Tensor
    squared_error: Tensor
    correlation: Tensor
    samples: Tensor

    def __init__(self, shape: tuple[int, int], shares: Tensor, *, mesh: ProcessMesh | None = None) -> None:
        """For ``shape`` (T, V); ``shares`` [nlat, 1] of the globe's area, of the rows that the fields are on."""
        super().__init__()
        self.shares, self.mesh = shares.double(), mesh or ProcessMesh()
        for name in ("area", "error", "squared_error", "correlation", "samples"):
            # The tiles of a globe hold the same sums, so those over all processes have the same ratios.
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(
        self,
        forecast: Tensor,
        target: Tensor,
        climatology: Tensor,
        *,
        valid: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> None:
        """Fields [B, T, V, nlat, nlon]; ``valid`` where the target has values.

        Samples of ``weight`` [B] 0 do not count.
        """
        shares = self.shares.to(target.device).expand(target.shape)
        if valid is not None:
            shares = shares * valid
        if weight is not None:
            shares = shares * (weight > 0)[:, None, None, None, None]
        there = shares > 0
        forecast, target, climatology = (torch.where(there, x.double(), 0.0) for x in (forecast, target, climatology))
        error, anomalies = forecast - target, (forecast - climatology, target - climatology)
        products = (error, error.square(), anomalies[0] * anomalies[1], *(x.square() for x in anomalies))
        sums = torch.stack([shares.sum((-2, -1)), *((x * shares).sum((-2, -1)) for x in products)])
        area, error, squared_error, covariance, *variances = sum_over_globe(sums, self.mesh)  # each [B, T, V]
        counted = area > 0
        correlation = covariance / (variances[0] * variances[1]).sqrt()
        self.area += area.sum(0)
        self.error += error.sum(0)
        self.squared_error += squared_error.sum(0)
        self.correlation += torch.where(counted, correlation, 0.0).sum(0)
        self.samples += counted.sum(0)

    def compute(self) -> dict[str, Tensor]:
        return {
            "rmse": (self.squared_error / self.area).sqrt(),
            "bias": self.error / self.area,
            "acc": self.correlation / self.samples,
        }


class MeanLoss(Metric):
    """Mean over samples of a loss of which each process has its tile's share."""

    is_differentiable = False
    total: Tensor
    samples: Tensor

    def __init__(self, *, mesh: ProcessMesh | None = None) -> None:
        super().__init__()
        self.tiles = 1 if mesh is None else mesh.globe_size
        for name in ("total", "samples"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, weight: Tensor) -> None:
        """``losses`` [B], this tile's share; samples of ``weight`` [B] 0 do not count."""
        self.total += losses.double()[weight > 0].sum()
        self.samples += (weight > 0).sum() / self.tiles

    def compute(self) -> Tensor:
        return self.total / self.samples


def skill(rmse: Tensor, reference: Tensor) -> Tensor:
    """1 - MSE / MSE of the reference: 1 is perfect, 0 no better (A. Murphy, Monthly Weather Review 116, 1988)."""
    return 1.0 - (rmse / reference).square()
