"""Messages between the processes of one globe: started at once, waited for later, and failing with a name.

Point-to-point messages alone, which gloo and NCCL both have, in 16 bits as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from sfno_dist.mesh.agreement import naming_the_lost
from sfno_dist.mesh.process_mesh import ProcessMesh

Message = tuple[int, Tensor]  # place in the globe of the other process, what goes to it or comes from it


class Flight:
    """Messages on their way; ``wait`` returns when all ``receives`` are filled. Empty messages are not sent.

    Two processes exchange messages in the order in which they start them, so both must start the same ones. They go
    the way of the devices, or ``on_cpu`` by gloo.
    """

    waited_s: ClassVar[float] = 0.0  # by this process so far, for all messages
    planned_bytes: ClassVar[int] = 0  # that would have come to it, on meshes on paper

    def __init__(
        self, mesh: ProcessMesh, sends: Sequence[Message], receives: Sequence[Message], *, on_cpu: bool = False
    ) -> None:
        self.mesh, self.works, self.places = mesh, [], []
        if mesh.paper:
            Flight.planned_bytes += sum(tensor.nbytes for _, tensor in receives)
            return
        operations = []
        for operation, messages in ((dist.isend, sends), (dist.irecv, receives)):
            for place, tensor in messages:
                if tensor.numel():
                    self.places.append(place)
                    group = mesh.groups.control if on_cpu else mesh.groups.space
                    operations.append(dist.P2POp(operation, _as_real(tensor), mesh.rank_of(place), group))
        if not operations:
            return
        self.kept = operations  # their tensors must live until the messages have arrived
        with naming_the_lost(mesh, self.places[0]):
            self.works = dist.batch_isend_irecv(operations)

    def wait(self) -> None:
        start = time.perf_counter()
        for index, work in enumerate(self.works):  # NCCL has one work for all, whose error names its peer
            with naming_the_lost(self.mesh, self.places[index]):
                work.wait()
        self.works = []
        Flight.waited_s += time.perf_counter() - start


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
