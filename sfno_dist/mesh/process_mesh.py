"""The process layout: how many processes share the samples of a batch and how many cut the globe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from sfno_dist.mesh import agreement
from sfno_dist.mesh.agreement import ProcessLostError
from sfno_dist.mesh.groups import AXES, Groups, groups_of

__all__ = ["ProcessLostError", "ProcessMesh"]

ROW_BALANCES = ("count", "work")


class ProcessMesh:
    """``data`` replicas, each of ``polar`` (cuts latitude) x ``azimuth`` (cuts longitude) processes.

    Made inside an initialised process group of just as many processes, by all of them alike; azimuth varies fastest
    with the rank, then polar, then data. One process needs no group and never communicates.

    Args:
        row_balance: cut latitude into equal ``count`` of rows, or into equal ``work`` of attention: rows near a pole
            have many times the neighbours.
        timeout_s: how long a process waits for another before it gives up, in seconds.

    Raises ``ValueError`` for counts below 1 and for a process group of another size.
    """

    def __init__(
        self,
        data: int = 1,
        polar: int = 1,
        azimuth: int = 1,
        *,
        row_balance: str = "count",
        timeout_s: float = 600.0,
    ) -> None:
        problem = None
        try:
            self._lay_out((data, polar, azimuth), row_balance, timeout_s)
            self._refuse_other_world()
        except ValueError as error:
            if not _among_others():
                raise
            problem = str(error)
        if (data, polar, azimuth) == (1, 1, 1) and problem is None:
            return
        layout = {"mesh": (data, polar, azimuth, row_balance), "mesh timeout in seconds": timeout_s}
        agreement.agree_on_layout(layout, problem, timeout_s)
        self.rank = dist.get_rank()
        groups_of(self.sizes, timeout_s)  # while all processes are here

    @classmethod
    def on_paper(
        cls, data: int = 1, polar: int = 1, azimuth: int = 1, *, rank: int = 0, row_balance: str = "count"
    ) -> ProcessMesh:
        """The layout as ``rank`` would see it, without processes: for plans and their costs.

        What would come from other processes has its size and no values.
        """
        mesh = cls.__new__(cls)
        mesh._lay_out((data, polar, azimuth), row_balance, 0.0)
        mesh.paper = True
        if not 0 <= rank < mesh.size:
            raise ValueError(f"rank must lie in 0..{mesh.size - 1} for {mesh}, got {rank}")
        mesh.rank = rank
        return mesh

    def _lay_out(self, sizes: tuple[int, int, int], row_balance: str, timeout_s: float) -> None:
        for axis, count in zip(AXES, sizes, strict=True):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"mesh.{axis} must be a whole number of at least 1, got {count!r}")
        if row_balance not in ROW_BALANCES:
            raise ValueError(f"mesh.row_balance must be one of {', '.join(ROW_BALANCES)}, got {row_balance!r}")
        self.data, self.polar, self.azimuth = self.sizes = sizes
        self.row_balance, self.timeout_s, self.rank, self.paper = row_balance, timeout_s, 0, False

    def _refuse_other_world(self) -> None:
        if self.size == 1:
            return
        layout = f"{self.data} x {self.polar} x {self.azimuth} = {self.size}"
        wanted = f"mesh asks for {layout} processes (data x polar x azimuth)"
        remedy = f"start {self.size} of them (torchrun --nproc-per-node {self.size}), or use mesh=single for one"
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(f"{wanted}, but torch.distributed.init_process_group has not been called here; {remedy}")
        if dist.get_world_size() != self.size:
            raise ValueError(f"{wanted}, but the process group has {dist.get_world_size()}; {remedy}")

    @property
    def size(self) -> int:
        return self.data * self.polar * self.azimuth

    @property
    def globe_size(self) -> int:
        """Number of processes that share one globe."""
        return self.polar * self.azimuth

    @property
    def place(self) -> int:
        """Index of this process among those of its globe: its rank in the groups ``space`` and ``control``."""
        return self.rank % self.globe_size

    @property
    def polar_index(self) -> int:
        return self.place // self.azimuth

    @property
    def azimuth_index(self) -> int:
        return self.place % self.azimuth

    @property
    def data_index(self) -> int:
        return self.rank // self.globe_size

    def rank_of(self, place: int) -> int:
        """Global rank of a process of the same globe."""
        return self.data_index * self.globe_size + place

    @property
    def groups(self) -> Groups:
        return groups_of(self.sizes, self.timeout_s)

    def agree(self, facts: Mapping[str, object], problem: str | None = None) -> None:
        """``ValueError``, the same on every process of the globe, where facts differ or one has a problem.

        All processes of the globe call this at the same point. One process alone only raises its problem.
        """
        if self.globe_size == 1 or self.paper:
            if problem is not None:
                raise ValueError(problem)
            return
        agreement.agree(self, facts, problem)

    @contextlib.contextmanager
    def alike(self) -> Iterator[dict[str, object]]:
        """Around what all processes of the globe do alike: yields facts to fill in, for ``agree`` at the end.

        A ``ValueError`` in the body is raised on every process, none of which waits for the one that failed.
        """
        facts: dict[str, object] = {}
        problem = None
        try:
            yield facts
        except ValueError as error:
            if self.globe_size == 1 or self.paper:
                raise
            problem = str(error)
        self.agree(facts, problem)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessMesh) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.sizes, self.rank, self.row_balance, self.timeout_s))

    def __repr__(self) -> str:
        return f"ProcessMesh(data={self.data}, polar={self.polar}, azimuth={self.azimuth})"


def _among_others() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
