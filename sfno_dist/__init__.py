"""Spherical attention and transformers for weather models, cut over a grid of processes."""

from sfno_dist.geometry import Grid, Neighbourhood
from sfno_dist.layers import SphericalAttention
from sfno_dist.mesh import Decomposition, ProcessMesh
from sfno_dist.models import SphericalTransformer
from sfno_dist.ops import spherical_attention

__all__ = [
    "Decomposition",
    "Grid",
    "Neighbourhood",
    "ProcessMesh",
    "SphericalAttention",
    "SphericalTransformer",
    "spherical_attention",
]
