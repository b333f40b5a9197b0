"""The spherical transformer: down to a latent grid, blocks of attention there, back up to the data's grid."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sfno_dist.geometry import Grid
from sfno_dist.layers import ChannelNorm, PointwiseLinear, PositionEmbedding, SphericalAttention, TransformerBlock
from sfno_dist.layers.weights import SameWeights
from sfno_dist.mesh import ProcessMesh


class SphericalTransformer(nn.Module):
    """Predicts the change of a field over one step: [B, in_channels, *grid] -> [B, out_channels, *grid].

    Args:
        in_channels: variables and features that enter; ``out_channels``: variables whose change comes out.
        grid: of input and output.
        latent_grid: on which the ``depth`` blocks work, ``embed_channels`` wide.
        latent_cutoff: great-circle radius in radians of the blocks' attention; default as in ``Neighbourhood``.
        mesh, exchange: the processes that share the globe, see ``SphericalAttention``; fields are then its tiles.

    The last map starts at zero, so that an untrained model predicts no change.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        grid: Grid,
        latent_grid: Grid,
        *,
        embed_channels: int = 64,
        depth: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        latent_cutoff: float | None = None,
        mesh: ProcessMesh | None = None,
        exchange: str = "halo",
        backend: str | None = None,
    ) -> None:
        super().__init__()
        width = embed_channels
        heads: Any = {"num_heads": num_heads, "mesh": mesh, "exchange": exchange, "backend": backend}
        self.lift = PointwiseLinear(in_channels, width)
        self.latent_position = PositionEmbedding(width, latent_grid, mesh=mesh)
        self.down = SphericalAttention(width, grid, latent_grid, **heads)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                width, latent_grid, hidden_channels=round(mlp_ratio * width), theta_cutoff=latent_cutoff, **heads
            )
            for _ in range(depth)
        )
        self.up_norm = ChannelNorm(width)
        self.up = SphericalAttention(width, latent_grid, grid, **heads)
        self.head = PointwiseLinear(width, out_channels)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_forward_pre_hook(SameWeights(ProcessMesh() if mesh is None else mesh))

    def forward(self, field: Tensor) -> Tensor:
        lifted = self.lift(field)
        # A latent point asks by where it lies; what it gets depends on the field around it.
        latent = self.down(self.latent_position().expand(len(field), -1, -1, -1), lifted)
        for block in self.blocks:
            latent = block(latent)
        return self.head(lifted + self.up(lifted, self.up_norm(latent)))
