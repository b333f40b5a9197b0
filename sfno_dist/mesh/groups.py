"""The process groups of a layout, made once for each process group that the program runs in."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

AXES = ("data", "polar", "azimuth")


@dataclass(frozen=True)
class Groups:
    """``device_mesh`` with an axis each for data, polar and azimuth, and two groups of the processes of one globe.

    ``space`` carries fields on the devices' backend; ``control`` is gloo and carries what processes agree on, so
    that an agreement never waits for a device. ``replicas``, gloo too, joins the processes that own the same tile.
    """

    device_mesh: DeviceMesh
    space: dist.ProcessGroup
    control: dist.ProcessGroup
    replicas: dist.ProcessGroup


def groups_of(sizes: tuple[int, int, int], timeout_s: float) -> Groups:
    """Every process of the program calls this alike; the same layout twice makes no second set."""
    return _groups(dist.group.WORLD, sizes, timeout_s)


@lru_cache(maxsize=16)  # by the surrounding process group, so that groups of one that was destroyed are not used
def _groups(world: dist.ProcessGroup, sizes: tuple[int, int, int], timeout_s: float) -> Groups:
    ranks = torch.arange(sizes[0] * sizes[1] * sizes[2]).reshape(sizes)  # azimuth fastest, then polar, then data

    def subgroups(members: torch.Tensor, backend: str | None = None) -> dist.ProcessGroup:
        timeout = timedelta(seconds=timeout_s)
        group, _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=timeout, backend=backend)
        return group

    of_axes = [subgroups(ranks.movedim(axis, -1).reshape(-1, sizes[axis])) for axis in range(3)]
    globes = ranks.reshape(sizes[0], -1)
    device_type = "cuda" if dist.get_backend(world) == "nccl" else "cpu"
    device_mesh = DeviceMesh.from_group(of_axes, device_type, mesh=ranks, mesh_dim_names=AXES)
    return Groups(device_mesh, subgroups(globes), subgroups(globes, "gloo"), subgroups(globes.T, "gloo"))
