"""Losses weighed by area."""

from __future__ import annotations

import torch
from torch import Tensor

from sfno_dist.comm import sum_over_globe
from sfno_dist.mesh import ProcessMesh


def area_weighted_mse(
    prediction: Tensor,
    target: Tensor,
    shares: Tensor,
    *,
    valid: Tensor | None = None,
    weight: Tensor | None = None,
    mesh: ProcessMesh | None = None,
) -> Tensor:
    """sum over points of share x squared error, averaged over channels and batch; fields [B, ..., nlat, nlon].

    A sum over points with weights that add up to 1 over the globe: tiles of it add up to the whole.

    Args:
        valid: bool, as the fields: the mean is over the points where it holds, of the whole globe of ``mesh``; a field
            without any counts as 0.
        weight: [B] what each sample counts, see ``sfno_dist.data.sampler.Draw``; by default 1.
    """
    if valid is None:
        of_fields = ((prediction - target).square() * shares).sum((-2, -1))
    else:
        shares = shares * valid
        # Masked before it is squared: a NaN there would come back as the gradient.
        square = torch.where(valid, prediction - target, 0.0).square()
        area = shares.sum((-2, -1))
        area = area if mesh is None else sum_over_globe(area, mesh)
        tiny = torch.finfo(area.dtype).tiny
        of_fields = (square * shares).sum((-2, -1)) / area.clamp_min(tiny)
    of_samples = of_fields.flatten(1).mean(1)
    return (of_samples if weight is None else of_samples * weight).mean()
