"""The ring: a chunk of every process passes all processes of its row of tiles, and sums come home with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from sfno_dist.comm.wire import Flight
from sfno_dist.mesh import ProcessMesh


class Ring:
    """The azimuth axis as a ring along which chunks [B, points, C] pass from east to west.

    ``points``: of each process's chunk, by azimuth index; they may differ. A process holds two chunks at a time, the
    one it works on and the one that arrives meanwhile.
    """

    def __init__(self, mesh: ProcessMesh, points: Sequence[int]) -> None:
        self.mesh, self.points = mesh, tuple(points)
        self.size, self.here = mesh.azimuth, mesh.azimuth_index
        row = mesh.polar_index * mesh.azimuth
        self.west, self.east = row + (self.here - 1) % self.size, row + (self.here + 1) % self.size

    def around(self, chunk: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every process's chunk in turn, with the azimuth index of its owner; the own one first."""
        for step in range(self.size):
            flight = None
            if step + 1 < self.size:
                flight, following = self._pass_on(chunk, step + 1)
            yield (self.here + step) % self.size, chunk
            if flight is not None:
                flight.wait()
                chunk = following

    def around_with_sums(self, chunk: Tensor, contribution: Callable[[int, Tensor], Tensor | None]) -> Tensor | None:
        """The sum over all processes of what each contributes to this process's chunk.

        ``contribution(owner, chunk)``: [B, points, any number of channels]; or None on all processes, and nothing is
        sent. This is the adjoint of ``around`` when each returns the gradient of its work.
        """
        flight, arriving = None, None
        for step, (owner, visitor) in enumerate(self.around(chunk)):
            total = contribution(owner, visitor)
            if total is None:
                continue
            if (
                flight is not None and arriving is not None
            ):  # the same owner's sum so far, from the process that its chunk came from
                flight.wait()
                total = total + arriving
            if self.size == 1:
                return total
            flight, arriving = self._pass_on(total, step + 1)
        if flight is not None:
            flight.wait()
        return arriving

    def _pass_on(self, tensor: Tensor, step: int) -> tuple[Flight, Tensor]:
        """Sends ``tensor`` west, and receives from the east what belongs to the owner of step ``step``."""
        points = self.points[(self.here + step) % self.size]
        arriving = tensor.new_empty(tensor.shape[0], points, tensor.shape[2])
        return Flight(self.mesh, [(self.west, tensor.contiguous())], [(self.east, arriving)]), arriving
