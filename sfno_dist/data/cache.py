"""Statistics kept on disk, under a name that depends on all that they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from sfno_dist.comm import sum_on_cpu
from sfno_dist.data.checks import files
from sfno_dist.data.failure import has_processes
from sfno_dist.data.output import whole_or_nothing
from sfno_dist.data.statistics import Statistics
from sfno_dist.mesh import Decomposition

VERSION = 1  # of what is measured and how


class StatisticsCache:
    """``load`` and ``save`` of one tile's statistics in ``folder``; without a folder nothing is kept.

    ``facts`` are what the statistics depend on beside the files, which count with name, length and time of change (of a
    zarr store its metadata and the folders of its arrays).
    """

    def __init__(self, folder: str | None, paths: list[str], tile: Decomposition, facts: Mapping[str, object]) -> None:
        self.mesh = tile.mesh
        self.path = None
        if folder is not None:
            known = (VERSION, sorted(facts.items()), [_identity(path) for path in files(paths)], str(tile))
            name = hashlib.sha256(repr(known).encode()).hexdigest()[:24]
            self.path = Path(folder) / f"statistics-{name}.npz"

    def load(self) -> Statistics | None:
        """What was saved, if every process of the mesh finds its part."""
        held = self._read()
        if has_processes(self.mesh):
            found = torch.tensor([held is not None], dtype=torch.int64)
            if int(sum_on_cpu(found, self.mesh)) < self.mesh.size:
                return None
        return held

    def _read(self) -> Statistics | None:
        if self.path is None:
            return None
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                return Statistics(**{"change_std": None, **stored})
        except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile):
            return None

    def save(self, statistics: Statistics) -> None:
        """Under the final name only once it is whole; a folder that cannot be written costs time, not the run."""
        if self.path is None or self.mesh.data_index > 0:
            return
        arrays = {name: array for name, array in vars(statistics).items() if array is not None}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_or_nothing(self.path, overwrite=True) as partial, open(partial, "wb") as file:
                np.savez(file, **arrays)


def _identity(path: str) -> list[tuple[str, int, int]]:
    """(name, bytes, nanoseconds of the last change) of a file, or of the parts of a zarr store that change with it."""
    if not os.path.isdir(path):
        parts = [Path(path)]
    else:
        arrays = [Path(entry) for entry in os.scandir(path) if entry.is_dir()]
        parts = [p for folder in (Path(path), *arrays) for p in (folder, folder / "c", *folder.glob("*z*"))]
    found = [(str(part.absolute()), part.stat()) for part in sorted(parts) if part.exists()]
    return [(name, 0 if os.path.isdir(name) else stat.st_size, stat.st_mtime_ns) for name, stat in found]
