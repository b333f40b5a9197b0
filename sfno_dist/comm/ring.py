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

    def around(self, chunk: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Every process's chunk in turn, with the azimuth index of its owner; the own one first."""
        for step in range(self.size):
            flight, following = self._pass_on(chunk, step + 1) if step + 1 < self.size else (None, [])
            yield (self.here + step) % self.size, chunk
            if flight is not None:
                flight.wait()
                chunk = following

    def around_with_sums(
        self, chunk: Sequence[Tensor], contribution: Callable[[int, Sequence[Tensor]], Sequence[Tensor]]
    ) -> Sequence[Tensor]:
        """The sums over all processes of what each contributes to this process's chunk.

        ``contribution(owner, chunk)``: fields [B, points, any number of channels], as many on all processes; where
        there are none, nothing is sent. This is the adjoint of ``around`` when each returns the gradient of its work.
        """
        flight: Flight | None = None
        so_far: list[Tensor] = []
        for step, (owner, visitor) in enumerate(self.around(chunk)):
            sums = contribution(owner, visitor)
            if flight is not None:  # what others contributed comes from where the chunk came from
                flight.wait()
                for total, arrived in zip(sums, so_far, strict=True):
                    total += arrived
            if self.size == 1:
                return sums
            flight, so_far = self._pass_on(sums, step + 1)
        if flight is not None:
            flight.wait()
        return so_far

    def _pass_on(self, chunk: Sequence[Tensor], step: int) -> tuple[Flight, list[Tensor]]:
        """Sends ``chunk`` west, and receives from the east what belongs to the owner of step ``step``."""
        points = self.points[(self.here + step) % self.size]
        arriving = [x.new_empty(x.shape[0], points, x.shape[2]) for x in chunk]
        sends = [(self.west, x.contiguous()) for x in chunk]
        return Flight(self.mesh, sends, [(self.east, x) for x in arriving]), arriving
