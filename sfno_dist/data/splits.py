"""Training, validation and test periods, and which sequences of times belong to each. They never leak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from sfno_dist.data.errors import DataError
from sfno_dist.data.timeline import period

SPLITS = ("train", "validation", "test")


class Splits:
    """First and last instant of each split, without overlap.

    A sample belongs to the split that holds all its targets; the field it starts from may be the last one before the
    period. But no sample starts in the period of a split that is judged later: no field of the test period enters
    training or validation, and none of the validation period enters training.
    """

    def __init__(self, splits: Mapping[str, Sequence[str]]) -> None:
        if set(splits) != set(SPLITS):
            raise DataError(f"data.splits needs {', '.join(SPLITS)}, got {', '.join(splits) or 'nothing'}")
        self.periods: dict[str, tuple[np.datetime64, np.datetime64]] = {}
        for split in SPLITS:
            dates = list(splits[split])
            if len(dates) != 2:
                raise DataError(f"data.splits.{split} needs a first and a last date, got {dates}")
            self.periods[split] = period(dates[0], dates[1], f"data.splits.{split}")
        ordered = sorted(self.periods.items(), key=lambda item: item[1][0])
        for (earlier, (_, end)), (later, (start, _)) in pairwise(ordered):
            if start <= end:
                raise DataError(f"data.splits: {earlier} and {later} overlap; a period must end before the next begins")

    def within(self, dates: np.ndarray, split: str) -> np.ndarray:
        """Which dates, datetime64, lie in the period of a split."""
        first, last = self.periods[split]
        return (dates >= first) & (dates <= last)

    def choose(self, runs: np.ndarray, dates: np.ndarray, split: str) -> np.ndarray:
        """Those sequences [n, T + 1] of times that are samples of a split."""
        chosen = self.within(dates, split)[runs[:, 1:]].all(axis=1)
        for later in SPLITS[SPLITS.index(split) + 1 :]:
            chosen &= ~self.within(dates, later)[runs[:, 0]]
        return runs[chosen]

    def text(self, split: str) -> str:
        first, last = self.periods[split]
        return f"{split} period {first.astype('datetime64[D]')} to {last.astype('datetime64[D]')}"
