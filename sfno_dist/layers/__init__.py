"""Building blocks of models on the sphere. Fields are [B, C, nlat, nlon]; no layer knows a process."""

from sfno_dist.layers.attention import SphericalAttention
from sfno_dist.layers.block import TransformerBlock
from sfno_dist.layers.embedding import PositionEmbedding
from sfno_dist.layers.pointwise import ChannelNorm, Mlp, PointwiseLinear
from sfno_dist.layers.randomness import Dropout, Noise, PathDropout, Randomness

__all__ = [
    "ChannelNorm",
    "Dropout",
    "Mlp",
    "Noise",
    "PathDropout",
    "PointwiseLinear",
    "PositionEmbedding",
    "Randomness",
    "SphericalAttention",
    "TransformerBlock",
]
