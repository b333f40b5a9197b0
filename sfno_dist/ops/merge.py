"""Partial results of attention over disjoint sets of keys, merged into the result over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """y = sum_p exp(lse_p - lse) y_p,  lse = log sum_p exp(lse_p)  from (y_p [.., Dv], lse_p [..]) of each part.

    Both in the dtype of lse; a part without keys has lse = -inf and takes no share. Differentiable.
    """
    (first, lse), *others = parts
    if not others:
        return first.to(lse.dtype), lse
    lses = torch.stack([lse for _, lse in parts])  # [parts, B, N, H, W]
    lse = torch.logsumexp(lses, 0)
    shares = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    total = shares[0, ..., None] * first.to(lse.dtype)
    for share, (y, _) in zip(shares[1:], others, strict=True):
        total.addcmul_(share[..., None], y.to(lse.dtype))
    return total, lse
