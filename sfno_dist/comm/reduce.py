"""Sums over processes, given to each of them: over those of one globe, its own adjoint, and on the CPU over all."""

from __future__ import annotations

from collections.abc import Collection
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


def sum_on_cpu(tensor: Tensor, mesh: ProcessMesh, *, over: Collection[str] = ("globe", "replicas")) -> Tensor:
    """Sum of CPU tensors over the processes of the globe, over those with the same tile, or over all; no gradient.

    By gloo whatever the devices: for counts and statistics, which live in float64 on the CPU.
    """
    total = tensor.clone(memory_format=torch.contiguous_format)
    if "replicas" in over and mesh.data > 1:
        dist.all_reduce(total, group=mesh.groups.replicas)
    if "globe" in over and mesh.globe_size > 1:
        dist.all_reduce(total, group=mesh.groups.control)
    return total


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
    if mesh.paper:
        return total
    # gloo sums no complex numbers
    dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, group=mesh.groups.space)
    return total
