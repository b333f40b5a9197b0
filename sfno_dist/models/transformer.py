"""The spherical transformer: down to a latent grid, blocks of attention there, back up to the data's grid."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sfno_dist.geometry import Grid
from sfno_dist.layers import ChannelNorm, PointwiseLinear, PositionEmbedding, SphericalAttention, TransformerBlock
from sfno_dist.layers.randomness import Moment, Noise, Randomness, check_rate
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
        recompute_blocks: keep only what enters each block and compute the rest again in backward.
        input_noise: standard deviation of Gaussian noise on the first ``state_channels`` of the input (all of them by
            default), which are in normalised units. dropout: probability that a channel of a cell is left out of what
            attention or MLP of a block adds. path_dropout: probability that all that a block's attention adds to a
            sample is left out. All three in training only, where ``randomness`` is told each step.

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
        input_noise: float = 0.0,
        state_channels: int | None = None,
        dropout: float = 0.0,
        path_dropout: float = 0.0,
        recompute_blocks: bool = False,
    ) -> None:
        super().__init__()
        width, here = embed_channels, ProcessMesh() if mesh is None else mesh
        heads: Any = {"num_heads": num_heads, "mesh": mesh, "exchange": exchange, "backend": backend}
        with here.alike() as facts:
            facts["input_noise, dropout and path_dropout"] = input_noise, dropout, path_dropout
            check_rate(dropout, "dropout")
            check_rate(path_dropout, "path_dropout")
            noisy = in_channels if state_channels is None else state_channels
            self.input_noise = Noise(input_noise, noisy, grid, place=0, mesh=mesh)
        self.recompute_blocks = recompute_blocks
        self.draws = max(input_noise, dropout, path_dropout) > 0.0
        self.randomness = Randomness(here)
        self.lift = PointwiseLinear(in_channels, width)
        self.latent_position = PositionEmbedding(width, latent_grid, mesh=mesh)
        self.down = SphericalAttention(width, grid, latent_grid, **heads)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                width,
                latent_grid,
                hidden_channels=round(mlp_ratio * width),
                theta_cutoff=latent_cutoff,
                dropout=dropout,
                path_dropout=path_dropout,
                place=1 + number * TransformerBlock.DRAWING_LAYERS,
                **heads,
            )
            for number in range(depth)
        )
        self.up_norm = ChannelNorm(width)
        self.up = SphericalAttention(width, latent_grid, grid, **heads)
        self.head = PointwiseLinear(width, out_channels)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_forward_pre_hook(SameWeights(here))

    def forward(self, field: Tensor) -> Tensor:
        moment = self.randomness.next(field) if self.training and self.draws else None
        lifted = self.lift(self.input_noise(field, moment))
        # A latent point asks by where it lies; what it gets depends on the field around it.
        latent = self.down(self.latent_position().expand(len(field), -1, -1, -1), lifted)
        for block in self.blocks:
            latent = self._recomputed(block, latent, moment) if self.recompute_blocks else block(latent, moment)
        return self.head(lifted + self.up(lifted, self.up_norm(latent)))

    @staticmethod
    def _recomputed(block: nn.Module, latent: Tensor, moment: Moment | None) -> Tensor:
        # What a block draws is a function of the moment, so it comes out the same the second time.
        return checkpoint(block, latent, moment, use_reentrant=False, preserve_rng_state=False)
