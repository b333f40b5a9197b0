"""The read ledger: bytes asked for and bytes of chunks touched, in every process.

``sfno_dist.data.ledger.LEDGER`` counts each read of a file that ``open_dataset`` opened. A read counts in full, also
where the library still holds the chunk from the read before. Coordinates, read once at opening, are not counted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from sfno_dist.data.layout import StoredLayout
from sfno_dist.data.stored import StoredArray


@dataclass
class Total:
    """Bytes as stored, uncompressed: of the values asked for, and of the chunks that hold them."""

    asked: int = 0
    touched: int = 0
    reads: int = 0

    @property
    def amplification(self) -> float:
        """Bytes touched per byte asked for; 1 where nothing was read."""
        return self.touched / self.asked if self.asked else 1.0


@dataclass
class Reads(Total):
    """Of one array in one file."""

    layout: StoredLayout = field(kw_only=True)


class ReadLedger:
    """Counts of this process; those of its DataLoader workers join in where ``of_workers`` starts them.

    ``entries``: {(file, variable in it): Reads}, without those of workers, of whom only the sum comes back.
    A forked process starts from nothing.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], Reads] = {}
        self._workers: list[torch.Tensor] = []
        self._mirror: np.ndarray | None = None  # in a worker: its row of the counts that the parent sees
        self._reading = True
        self._lock = threading.Lock()

    def read(
        self, array: StoredArray, key: tuple[slice, ...], *, path: str, name: str, wanted: int, may_miss: bool = False
    ) -> np.ndarray:
        """``array.read(key)``, noted as a read of ``wanted`` values of the array ``name`` in the file ``path``."""
        layout = array.layout
        asked, touched = layout.itemsize * wanted, layout.touched(key)
        with self._lock:
            entry = self.entries.get((path, name))
            if entry is None:
                entry = self.entries[path, name] = Reads(layout=layout)
            # A file may be written anew in another layout.
            entry.layout, entry.reads = layout, entry.reads + 1
            entry.asked, entry.touched = entry.asked + asked, entry.touched + touched
            if self._mirror is not None and self._reading:
                self._mirror += (asked, touched, 1)
        if self._reading:
            return array.read(key, may_miss=may_miss)
        return np.zeros([part.stop - part.start for part in key], np.float32)

    @property
    def total(self) -> Total:
        """Of all files, this process and its workers together."""
        with self._lock:
            counts = [(entry.asked, entry.touched, entry.reads) for entry in self.entries.values()]
            counts += [tuple(row) for shared in self._workers for row in shared.tolist()]
        return Total(*(sum(column) for column in zip(*counts, strict=True))) if counts else Total()

    def clear(self) -> None:
        with self._lock:
            self.entries.clear()
            for shared in self._workers:
                shared.zero_()

    def of_workers(self, count: int) -> Callable[[int], None]:
        """A ``worker_init_fn`` for a DataLoader of ``count`` workers: their sums join ``total``, forked or spawned."""
        shared = torch.zeros(count, 3, dtype=torch.int64).share_memory_()
        self._workers.append(shared)
        return _WorkerStart(shared)

    @contextmanager
    def without_reading(self) -> Iterator[dict[tuple[str, str], Reads]]:
        """Within it reads give zeros and go into the entries that it yields, not into those of real reads.

        What a layout costs is so known before anything is read, by the very code that reads.
        """
        kept, self.entries, self._reading = self.entries, {}, False
        try:
            yield self.entries
        finally:
            self.entries, self._reading = kept, True

    def _start_anew(self, mirror: torch.Tensor | None = None) -> None:
        self.entries, self._workers, self._lock = {}, [], threading.Lock()
        self._mirror = None if mirror is None else mirror.numpy()


class _WorkerStart:
    def __init__(self, shared: torch.Tensor) -> None:
        self.shared = shared

    def __call__(self, worker: int) -> None:
        LEDGER._start_anew(self.shared[worker])


LEDGER = ReadLedger()
os.register_at_fork(after_in_child=LEDGER._start_anew)
