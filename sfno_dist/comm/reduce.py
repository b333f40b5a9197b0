"""The sum over the processes of one globe, everywhere; it is its own adjoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sfno_dist.mesh import ProcessMesh


def sum_over_globe(tensor: Tensor, mesh: ProcessMesh) -> Tensor:
    """sum over the tiles of ``tensor``, of one shape on all processes of the globe, given to each of them.

    Each process's loss is its share of the whole, so the gradient is the sum of all processes' gradients.
    """
    return tensor if mesh.globe_size == 1 else _Sum.apply(tensor, mesh)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: ProcessMesh) -> Tensor:
        ctx.mesh = mesh
        return _summed(tensor, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _summed(gradient, ctx.mesh), None


def _summed(tensor: Tensor, mesh: ProcessMesh) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    # gloo sums no complex numbers
    dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, group=mesh.groups.space)
    return total
