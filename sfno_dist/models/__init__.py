"""Models: lists of layers."""

from sfno_dist.models.transformer import SphericalTransformer

__all__ = ["SphericalTransformer"]
