"""Spherical attention and transformers for weather models, cut over a grid of processes."""

from sfno_dist.geometry import Grid, Neighbourhood
from sfno_dist.layers import SphericalAttention
from sfno_dist.models import SphericalTransformer
from sfno_dist.ops import spherical_attention

__all__ = ["Grid", "Neighbourhood", "SphericalAttention", "SphericalTransformer", "spherical_attention"]
