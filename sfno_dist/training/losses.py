"""Losses weighed by area."""

from __future__ import annotations

import torch
from torch import Tensor

from sfno_dist.geometry import Grid


def area_shares(grid: Grid) -> Tensor:
    """Share of the globe's area that one point of each row stands for   [nlat, 1] float32, over all points sum 1"""
    return torch.from_numpy(grid.cell_areas / (grid.cell_areas.sum() * grid.nlon)).float()[:, None]


def area_weighted_mse(prediction: Tensor, target: Tensor, shares: Tensor) -> Tensor:
    """sum over points of share x squared error, averaged over batch and channels; fields [B, ..., nlat, nlon].

    A sum over points with weights that add up to 1 over the globe: tiles of it add up to the whole.
    """
    return ((prediction - target).square() * shares).sum((-2, -1)).mean()
