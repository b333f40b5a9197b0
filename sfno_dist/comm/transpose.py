"""The transpose: a field cut along one dim becomes a field cut along another; its adjoint is the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sfno_dist.comm.wire import Flight
from sfno_dist.mesh import ProcessMesh

Bounds = tuple[int, ...]


def transpose(
    field: Tensor, mesh: ProcessMesh, axis: str, *, whole: tuple[int, Bounds], cut: tuple[int, Bounds]
) -> Tensor:
    """Makes dim ``whole`` whole, which is cut along ``axis`` ("polar" or "azimuth"), and cuts dim ``cut`` instead.

    Both name a dim and its bounds [processes along the axis + 1]: [.., cut bounds[-1], .., own part of whole, ..] ->
    [.., own part of cut, .., whole bounds[-1], ..]. ``ValueError`` for a field that does not fit the bounds.
    """
    size, here = (mesh.azimuth, mesh.azimuth_index) if axis == "azimuth" else (mesh.polar, mesh.polar_index)
    own = whole[1][here + 1] - whole[1][here]
    if field.shape[whole[0]] != own or field.shape[cut[0]] != cut[1][-1] or len(cut[1]) != size + 1:
        raise ValueError(
            f"transpose along {axis} ({size} processes) needs {own} in dim {whole[0]} and "
            f"{cut[1][-1]} in dim {cut[0]}, cut into {size}, got shape {list(field.shape)} and bounds {cut[1]}"
        )
    return field if size == 1 else _Transpose.apply(field, mesh, axis, whole, cut)


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, field: Tensor, mesh: ProcessMesh, axis: str, whole: Any, cut: Any) -> Tensor:
        ctx.arguments = mesh, axis, cut, whole
        return _exchanged(field, mesh, axis, whole, cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _exchanged(gradient, *ctx.arguments), None, None, None, None


def _exchanged(
    field: Tensor, mesh: ProcessMesh, axis: str, whole: tuple[int, Bounds], cut: tuple[int, Bounds]
) -> Tensor:
    along_azimuth = axis == "azimuth"
    here = mesh.azimuth_index if along_azimuth else mesh.polar_index
    stride = 1 if along_azimuth else mesh.azimuth
    places = [mesh.place + (other - here) * stride for other in range(len(cut[1]) - 1)]
    pieces = [
        field.narrow(cut[0], start, stop - start).contiguous()
        for start, stop in zip(cut[1][:-1], cut[1][1:], strict=True)
    ]
    arrivals = []
    for start, stop in zip(whole[1][:-1], whole[1][1:], strict=True):
        shape = list(pieces[here].shape)
        shape[whole[0]] = stop - start
        arrivals.append(field.new_empty(shape))
    arrivals[here] = pieces[here]
    others = [other for other in range(len(places)) if other != here]
    Flight(mesh, [(places[i], pieces[i]) for i in others], [(places[i], arrivals[i]) for i in others]).wait()
    return torch.cat(arrivals, whole[0])
