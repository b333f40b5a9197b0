"""An error in the data of one process becomes the same error on all of them, where they would wait for it for ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    raise kind(next(text for text in _of_all(problem, mesh) if text is not None))


def refuse_differences(facts: Mapping[str, str], mesh: ProcessMesh) -> None:
    """``DataError`` on every process where a fact about the data differs between any of them; all call this alike.

    Where one node lacks a file, or reads it while it is written, the others would wait for batches that never come.
    """
    if not has_processes(mesh):
        return
    everybody = _of_all(dict(facts), mesh)
    for name, first in everybody[0].items():
        other = next((found[name] for found in everybody if found[name] != first), None)
        if other is not None:
            raise DataError(
                f"processes found different data: {name} {first} and {other}; give all of them the same files"
            )


def _of_all(value: Any, mesh: ProcessMesh) -> list[Any]:
    """The value of every process, by replica and place, on all of them."""
    everybody: list[list[Any]] = [[None]] * mesh.globe_size
    replicas: list[Any] = [None] * mesh.data
    dist.all_gather_object(replicas, value, group=mesh.groups.replicas)
    dist.all_gather_object(everybody, replicas, group=mesh.groups.control)
    return [found for replica in zip(*everybody, strict=True) for found in replica]
