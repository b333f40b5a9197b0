"""The repeated unit of the transformer."""

from __future__ import annotations

from torch import Tensor, nn

from sfno_dist.geometry import Grid
from sfno_dist.layers.attention import SphericalAttention
from sfno_dist.layers.pointwise import ChannelNorm, Mlp
from sfno_dist.layers.randomness import Dropout, Moment, PathDropout
from sfno_dist.mesh import ProcessMesh


class TransformerBlock(nn.Module):
    """Pre-norm self-attention and MLP, each added to its input: [B, C, nlat, nlon] -> same.

    ``dropout`` is of what both add, cell by cell; ``path_dropout`` of all that attention adds to a sample. ``place``
    numbers the first of the ``DRAWING_LAYERS`` layers that draw, among those of a model.
    """

    DRAWING_LAYERS = 3

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
        dropout: float = 0.0,
        path_dropout: float = 0.0,
        place: int = 0,
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
        self.attention_dropout = Dropout(dropout, grid, place=place, mesh=mesh)
        self.attention_path = PathDropout(path_dropout, place=place + 1)
        self.mlp_dropout = Dropout(dropout, grid, place=place + 2, mesh=mesh)

    def forward(self, field: Tensor, moment: Moment | None = None) -> Tensor:
        """``moment``: of training, where layers draw."""
        attended = self.attention_dropout(self.attention(self.attention_norm(field)), moment)
        field = field + self.attention_path(attended, moment)
        return field + self.mlp_dropout(self.mlp(self.mlp_norm(field)), moment)
