"""The attention operation on a window of the globe: one torch.library op, its reference and compiled kernels."""

from sfno_dist.ops.attend import Window, attend
from sfno_dist.ops.functional import spherical_attention

__all__ = ["Window", "attend", "spherical_attention"]
