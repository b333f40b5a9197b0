"""Losses weighed by area."""

from __future__ import annotations

from torch import Tensor


def area_weighted_mse(prediction: Tensor, target: Tensor, shares: Tensor) -> Tensor:
    """sum over points of share x squared error, averaged over batch and channels; fields [B, ..., nlat, nlon].

    A sum over points with weights that add up to 1 over the globe: tiles of it add up to the whole.
    """
    return ((prediction - target).square() * shares).sum((-2, -1)).mean()
