"""An error in the data of one process becomes the same error on all of them, where they would wait for it for ever."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sfno_dist.comm import sum_on_cpu
from sfno_dist.data.errors import DataError
from sfno_dist.mesh import ProcessMesh


def has_processes(mesh: ProcessMesh) -> bool:
    """Whether the other processes of the mesh exist; they do not where it is a layout on paper."""
    return mesh.size > 1 and dist.is_available() and dist.is_initialized()


def raise_everywhere(problem: str | None, mesh: ProcessMesh, kind: type[Exception] = DataError) -> None:
    """An error with the first problem of any process, on every process; all of them call this alike."""
    if not has_processes(mesh):
        if problem is not None:
            raise kind(problem)
        return
    flag = torch.tensor([problem is not None], dtype=torch.int64)
    if int(sum_on_cpu(flag, mesh)) == 0:
        return
    everybody: list[list[str | None]] = [[None]] * mesh.globe_size
    replicas: list[str | None] = [None] * mesh.data
    dist.all_gather_object(replicas, problem, group=mesh.groups.replicas)
    dist.all_gather_object(everybody, replicas, group=mesh.groups.control)
    raise kind(next(text for replica in zip(*everybody, strict=True) for text in replica if text is not None))
