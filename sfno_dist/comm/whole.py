"""Tiles put together: fields of the whole globe, each on one of its processes. For output; no gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfno_dist.comm.wire import Flight
from sfno_dist.mesh import Decomposition


def whole(fields: Tensor, tile: Decomposition, at: Sequence[int]) -> dict[int, Tensor]:
    """Field v of all tiles, on the process ``at[v]`` of the globe; each gets its own, by v   {v: [nlat, nlon]}

    ``fields`` [V, H, W] on the CPU, of this process's ``tile``; by gloo whatever the devices. No process holds more
    than the fields that it gets. All processes of the globe call this alike.
    """
    mesh = tile.mesh
    mine = [v for v, place in enumerate(at) if place == mesh.place]
    if mesh.globe_size == 1:
        return {v: fields[v] for v in mine}
    others = [place for place in range(mesh.globe_size) if place != mesh.place]
    sends = [(place, fields[[v for v, there in enumerate(at) if there == place]].contiguous()) for place in others]
    arrivals = {place: fields.new_empty(len(mine), *_shape(tile, place)) for place in others}
    Flight(mesh, sends, list(arrivals.items()), on_cpu=True).wait()
    globes = fields.new_empty(len(mine), *tile.grid.shape)
    for place, part in {**arrivals, mesh.place: fields[mine]}.items():
        globes[:, *tile.tile(place)] = part
    return dict(zip(mine, globes, strict=True))


def _shape(tile: Decomposition, place: int) -> torch.Size:
    return torch.Size(part.stop - part.start for part in tile.tile(place))
