"""The repeated unit of the transformer."""

from __future__ import annotations

from torch import Tensor, nn

from sfno_dist.geometry import Grid
from sfno_dist.layers.attention import SphericalAttention
from sfno_dist.layers.pointwise import ChannelNorm, Mlp
from sfno_dist.mesh import ProcessMesh


class TransformerBlock(nn.Module):
    """Pre-norm self-attention and MLP, each added to its input: [B, C, nlat, nlon] -> same."""

    def __init__(
        self,
        channels: int,
        grid: Grid,
        *,
        num_heads: int,
        hidden_channels: int,
        theta_cutoff: float | None = None,
        mesh: ProcessMesh | None = None,
        exchange: str = "halo",
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = ChannelNorm(channels)
        self.attention = SphericalAttention(
            channels,
            grid,
            num_heads=num_heads,
            theta_cutoff=theta_cutoff,
            qk_norm=True,
            mesh=mesh,
            exchange=exchange,
            backend=backend,
        )
        self.mlp_norm = ChannelNorm(channels)
        self.mlp = Mlp(channels, hidden_channels)

    def forward(self, field: Tensor) -> Tensor:
        field = field + self.attention(self.attention_norm(field))
        return field + self.mlp(self.mlp_norm(field))
