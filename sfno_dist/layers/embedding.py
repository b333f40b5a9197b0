"""Where a point lies on the globe, as features that a layer can use."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sfno_dist.geometry import Grid


class PositionEmbedding(nn.Module):
    """A learned map of every point's position: () -> [1, channels, nlat, nlon]."""

    features: Tensor

    def __init__(self, channels: int, grid: Grid) -> None:
        super().__init__()
        # Not in the state dict: a checkpoint fits every tile and every grid of the same model.
        self.register_buffer("features", torch.from_numpy(grid.positions).float(), persistent=False)
        self.expand = nn.Linear(3, channels)
        self.mix = nn.Linear(channels, channels)

    def forward(self) -> Tensor:
        features = self.features.movedim(0, -1)
        return self.mix(nn.functional.gelu(self.expand(features))).movedim(-1, 0)[None]
