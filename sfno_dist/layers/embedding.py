"""Where a point lies on the globe, as features that a layer can use."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sfno_dist.geometry import Grid
from sfno_dist.mesh import Decomposition, ProcessMesh


class PositionEmbedding(nn.Module):
    """A learned map of every point's position: () -> [1, channels, nlat, nlon], the tile of this process."""

    features: Tensor

    def __init__(self, channels: int, grid: Grid, *, mesh: ProcessMesh | None = None) -> None:
        super().__init__()
        # Not in the state dict: a checkpoint fits every tile and every grid of the same model.
        tile = Decomposition(grid, ProcessMesh() if mesh is None else mesh)
        positions = torch.from_numpy(grid.positions[:, tile.rows, tile.columns].copy())
        self.register_buffer("features", positions.float(), persistent=False)
        self.expand = nn.Linear(3, channels)
        self.mix = nn.Linear(channels, channels)

    def forward(self) -> Tensor:
        features = self.features.movedim(0, -1)
        return self.mix(nn.functional.gelu(self.expand(features))).movedim(-1, 0)[None]
