"""Which chunks of an HDF5 array were ever written: others read as a constant, or as whatever memory held."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Collection

import netCDF4
import numpy as np

from sfno_dist.data.chunks import touched

try:
    import h5py
except ImportError:  # a dependency, which only an installation without dependencies lacks
    h5py = None

Box = tuple[slice, ...]


class HDF5Array:
    """Chunks that lie in the file; an array in one piece is one chunk."""

    absent_text = "was never written, so its values would be a constant or chance; write it, or the file anew"

    def __init__(self, chunks: tuple[int, ...], written: set[tuple[int, ...]]) -> None:
        self.chunks, self.written = chunks, written

    @classmethod
    def of(cls, path: str, variable: netCDF4.Variable, codes: Collection) -> HDF5Array | None:
        """None where all chunks were written, or what was not reads as missing.

        That is so with a fill value among the ``codes`` of missing values, and with the library's own.
        """
        if variable.group().disk_format != "HDF5":
            return None
        told = variable.get_fill_value()
        if told is not None:
            fill = np.ravel(told)[0]
            if fill in codes or fill != fill or fill == _own_fill(variable):
                return None
        if h5py is None:
            warnings.warn(
                f"{path}: what was never written of {variable.name} reads as numbers, which only h5py can tell; "
                f"install h5py",
                stacklevel=2,
            )
            return None
        with h5py.File(path, "r") as file:
            stored = file.get(variable.name)
            return cls._of(stored) if isinstance(stored, h5py.Dataset) and stored.size else None

    @classmethod
    def _of(cls, stored: h5py.Dataset) -> HDF5Array | None:
        if stored.chunks is None:
            plan = stored.id.get_create_plist()
            apart = plan.get_layout() != h5py.h5d.CONTIGUOUS or plan.get_external_count() > 0
            return None if apart or stored.id.get_storage_size() > 0 else cls(stored.shape, set())
        chunks = stored.chunks
        count = math.prod(-(-n // chunk) for n, chunk in zip(stored.shape, chunks, strict=True))
        if stored.id.get_num_chunks() == count:
            return None
        written: set[tuple[int, ...]] = set()

        def note(chunk) -> None:
            written.add(tuple(start // size for start, size in zip(chunk.chunk_offset, chunks, strict=True)))

        stored.id.chunk_iter(note)
        return cls(chunks, written)

    def absent(self, selection: Box) -> list[tuple[str, Box]]:
        """(name, part of the array) of each chunk that a selection of step 1 touches and the file lacks."""
        ranges = (touched(part, size) for part, size in zip(selection, self.chunks, strict=True))
        found = []
        for index in itertools.product(*ranges):
            if index not in self.written:
                box = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, self.chunks, strict=True))
                found.append((".".join(map(str, index)), box))
        return found


def _own_fill(variable: netCDF4.Variable) -> int | float | str | None:
    return netCDF4.default_fillvals.get(np.dtype(variable.dtype).str[1:]) if variable.dtype is not str else None
