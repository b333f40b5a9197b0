"""Where a point lies on the globe, as features that a layer can use."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from sfno_dist.geometry import Grid


def position_features(grid: Grid) -> np.ndarray:
    """Sine of latitude and cosine of latitude times cosine and sine of longitude: smooth at the poles.

    These are the Cartesian coordinates of the point on the unit sphere   [3, nlat, nlon] float64
    """
    sin_theta, cos_theta = np.sin(grid.colatitudes)[:, None], np.cos(grid.colatitudes)[:, None]
    longitudes = grid.longitudes[None, :]
    z = np.broadcast_to(cos_theta, grid.shape)
    return np.stack([z, sin_theta * np.cos(longitudes), sin_theta * np.sin(longitudes)])


class PositionEmbedding(nn.Module):
    """A learned map of every point's position: () -> [1, channels, nlat, nlon]."""

    features: Tensor

    def __init__(self, channels: int, grid: Grid) -> None:
        super().__init__()
        # Not in the state dict: a checkpoint fits every tile and every grid of the same model.
        self.register_buffer("features", torch.from_numpy(position_features(grid)).float(), persistent=False)
        self.expand = nn.Linear(3, channels)
        self.mix = nn.Linear(channels, channels)

    def forward(self) -> Tensor:
        features = self.features.movedim(0, -1)
        return self.mix(nn.functional.gelu(self.expand(features))).movedim(-1, 0)[None]
