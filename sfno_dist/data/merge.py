"""The times of many files as one axis."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from sfno_dist.data.calendars import time_text
from sfno_dist.data.errors import DataError
from sfno_dist.data.source import SourceFile


@dataclass
class Series:
    """Files that hold a variable together. ``places`` [n, 2]: file and index in it of each canonical time, rising.

    ``repeated`` [k, 4]: of times that come twice, the place that counts and the other one.
    """

    sources: list[SourceFile]
    places: np.ndarray
    instants: np.ndarray
    repeated: np.ndarray = field(default_factory=lambda: np.empty((0, 4), np.int64))

    @classmethod
    def of(cls, sources: list[SourceFile]) -> Series:
        """Of a time in several files the one of the final data (expver 1) counts, then the first."""
        sizes = [source.times.size for source in sources]
        files = np.repeat(np.arange(len(sources)), sizes)
        indices = np.concatenate([np.arange(size) for size in sizes])
        moments = np.concatenate([source.instants for source in sources])
        ranks = np.concatenate(
            [
                np.zeros(n, int) if s.expver_ranks is None else s.expver_ranks
                for s, n in zip(sources, sizes, strict=True)
            ]
        )
        order = np.lexsort((np.arange(len(moments)), ranks, moments))
        first = np.append(True, np.diff(moments[order]) > 0)[: len(order)]
        place = np.stack([files, indices], axis=1)[order]
        leaders = np.flatnonzero(first)[np.cumsum(first) - 1]
        same_rank = ranks[order] == ranks[order][leaders]
        others = np.flatnonzero(~first & same_rank)  # a preliminary value may differ from the final one
        repeated = np.concatenate([place[leaders[others]], place[others]], axis=1)
        return cls(sources, place[first], moments[order][first], repeated)

    def times(self) -> np.ndarray:
        return np.array([self.sources[s].times[i] for s, i in self.places], dtype=self.sources[0].times.dtype)

    def complete(self, name: str) -> np.ndarray:
        """Whether the files declare the variable there   [n] bool"""
        declared = np.ones(len(self.places), bool)
        for number, source in enumerate(self.sources):
            absent = source.absent_times(name)
            if absent.size:
                declared &= ~((self.places[:, 0] == number) & np.isin(self.places[:, 1], absent))
        return declared

    def refuse_conflicts(self, name: str, *, may_miss: bool) -> None:
        """``DataError`` where a time that comes twice has two values."""
        rows, columns = (np.arange(n) for n in self.sources[0].grid.shape)
        bar = tqdm(self.repeated, desc=f"comparing repeated times of {name}", unit="time", delay=3.0, leave=False)
        for s, i, other, j in bar:
            first, second = self.sources[s], self.sources[other]
            a, b = (
                source.read([name], np.array([index]), rows, columns, may_miss=[name] * may_miss).fields[0, 0]
                for source, index in ((first, i), (second, j))
            )
            a, b = a.astype(np.float64), b.astype(np.float64)
            # Files packed one by one round the same value differently: by about 1/65000 of the range.
            known = a[np.isfinite(a)]
            spread = float(np.ptp(known)) if known.size else 0.0
            tolerance = 1e-4 * max(spread, 1e-6 * float(np.abs(known).max(initial=0.0)))
            gaps = np.isnan(a) != np.isnan(b)
            difference = float(np.nanmax(np.abs(a - b), initial=0.0))
            if gaps.any() or difference > tolerance:
                how = (
                    f"differs by {difference:g}" if not gaps.any() else f"is missing at {int(gaps.sum())} other points"
                )
                raise DataError(
                    f"{second.path}: values conflict with {first.path}: {name} at time {time_text(second.times[j])} "
                    f"{how}; remove one of them"
                )


def common_times(series: dict[str, Series]) -> np.ndarray:
    """The times of every variable, which must be the same   [n]"""
    first, *others = series
    for name in others:
        if series[name] is series[first] or np.array_equal(series[name].instants, series[first].instants):
            continue
        lacking, having = name, first
        only = np.setdiff1d(series[first].instants, series[name].instants)
        if only.size == 0:
            lacking, having = first, name
            only = np.setdiff1d(series[name].instants, series[first].instants)
        place = series[having].places[np.searchsorted(series[having].instants, only[0])]
        moment = time_text(series[having].sources[place[0]].times[place[1]])
        raise DataError(
            f"{series[lacking].sources[0].path}: {lacking} has no time {moment}, which {having} has ({only.size} such "
            f"times); give files that cover the same times"
        )
    return series[first].times()
