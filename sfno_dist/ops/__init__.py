"""The attention operation on a window of the globe: one torch.library op, its reference and compiled kernels."""

from sfno_dist.ops.attend import Window, attend
from sfno_dist.ops.functional import spherical_attention
from sfno_dist.ops.merge import merge

__all__ = ["Window", "attend", "merge", "spherical_attention"]
