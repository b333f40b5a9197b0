"""Variables over all the files that hold them, read many at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from sfno_dist.data.merge import Series


@dataclass
class Fields:
    """The reader behind an ``open_dataset``: it knows where each canonical time lies and reads just what is asked for.

    ``series`` are the files of each variable; those in ``missing`` may lack values. It holds no open file, so it may be
    pickled, forked, and used by threads.
    """

    series: dict[str, Series]
    missing: Collection[str] = ()
    _odd: set[str] = field(default_factory=set)  # of these a warning has been given

    def read(self, variables: Sequence[str], times: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Checked values at canonical indices [int64 each]   [times, variables, rows, columns] float32

        Variables of one file that share chunks are read together. ``DataError`` as in ``open_dataset``.
        """
        groups: dict[int, list[int]] = {}
        for number, name in enumerate(variables):
            groups.setdefault(id(self.series[name]), []).append(number)
        values = np.empty((len(times), len(variables), len(rows), len(columns)), np.float32)
        for numbers in groups.values():
            series = self.series[variables[numbers[0]]]
            files, indices = series.places[times].T
            for file in dict.fromkeys(files.tolist()):
                mine = np.flatnonzero(files == file)
                read = self._read_file(
                    series.sources[file], [variables[n] for n in numbers], indices[mine], rows, columns
                )
                if read.shape == values.shape:
                    return read
                values[np.ix_(mine, np.array(numbers))] = read
        return values

    def stored_type(self, variable: str) -> np.dtype:
        """Of the numbers in the files."""
        source = self.series[variable].sources[0]
        return np.dtype(source.fields[source.stored_name(variable)[0]].dtype)

    def _read_file(self, source, variables, indices, rows, columns) -> np.ndarray:
        may_miss = [name for name in variables if name in self.missing]
        read = source.read(variables, indices, rows, columns, may_miss=may_miss)
        for number, name in enumerate(variables):
            if name not in self._odd and source.warn_implausible(name, read.lowest[number], read.highest[number]):
                self._odd.add(name)
        return read.fields
