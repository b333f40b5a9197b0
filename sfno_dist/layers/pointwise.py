"""Layers that act on each grid point alone, on channel-first fields [B, C, H, W].

Inside they work channels-last, where a map over the channels is one matrix product over contiguous memory;
``movedim`` is a view, and a field that came out of such a layer is already laid out that way.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class PointwiseLinear(nn.Linear):
    """Linear map over the channels of every point: [B, C, H, W] -> [B, C', H, W]."""

    def forward(self, field: Tensor) -> Tensor:
        return super().forward(field.movedim(1, -1)).movedim(-1, 1)


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of every point: [B, C, H, W] -> same."""

    def forward(self, field: Tensor) -> Tensor:
        return super().forward(field.movedim(1, -1)).movedim(-1, 1)


class Mlp(nn.Module):
    """Two pointwise maps with a GELU between, the hidden one ``hidden_channels`` wide."""

    def __init__(self, channels: int, hidden_channels: int) -> None:
        super().__init__()
        self.expand = PointwiseLinear(channels, hidden_channels)
        self.contract = PointwiseLinear(hidden_channels, channels)

    def forward(self, field: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(field)))
