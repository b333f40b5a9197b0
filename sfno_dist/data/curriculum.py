"""How long the rollouts of a split are, epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sfno_dist.data.errors import DataError


class Curriculum:
    """``steps`` targets of each sample in every epoch, or stages [first epoch, steps] in order, from epoch 0 on.

    ``DataError`` for what is neither.
    """

    def __init__(self, steps: int | Sequence[Sequence[int]], split: str) -> None:
        given: Any = [(0, steps)] if isinstance(steps, int) else steps
        try:
            self.stages = [(int(start), int(count)) for start, count in given]
        except (TypeError, ValueError):
            self.stages = []
        starts = [start for start, _ in self.stages]
        if starts[:1] != [0] or starts != sorted(set(starts)) or min(count for _, count in self.stages) < 1:
            raise DataError(
                f"data.rollout_steps of {split} must be a whole number of at least 1, or stages [first epoch, steps] "
                f"such as [[0, 1], [10, 2]] of which the first begins with epoch 0, got {steps!r}"
            )

    def steps(self, epoch: int) -> int:
        return max((start, count) for start, count in self.stages if start <= epoch)[1]

    def epochs_to_next(self, epoch: int) -> int:
        """From ``epoch`` to the first one of the next stage; 0 in the last stage."""
        return min((start - epoch for start, _ in self.stages if start > epoch), default=0)
