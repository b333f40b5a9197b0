"""The process layout: how many processes share the samples of a batch and how many cut the globe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessMesh:
    """``data`` replicas, each of ``polar`` (cuts latitude) x ``azimuth`` (cuts longitude) processes.

    Raises ``ValueError`` for counts below 1 and for layouts of several processes, which this version cannot run.
    """

    data: int = 1
    polar: int = 1
    azimuth: int = 1

    def __post_init__(self) -> None:
        for axis, count in vars(self).items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"mesh.{axis} must be a whole number of at least 1, got {count!r}")
        if self.size > 1:
            raise ValueError(
                f"mesh asks for {self.data} x {self.polar} x {self.azimuth} = {self.size} processes (data x polar x "
                f"azimuth), but this version runs on one; use mesh=single"
            )

    @property
    def size(self) -> int:
        return self.data * self.polar * self.azimuth
