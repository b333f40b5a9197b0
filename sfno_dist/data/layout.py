"""How a stored array is laid out, and the bytes that a read of a part of it touches. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

# An array that lies in one piece is read through the sieve buffer of HDF5: a short run brings in what follows it.
# netCDF-3 goes through a buffer of its own, of much the same effect.
SIEVE_BYTES = 64 * 1024

# Finding and opening one more chunk of a zarr takes about as long as reading and decoding this much.
REQUEST_BYTES = 64 * 1024
MOST_CHUNKS = 16
GOOD_AMPLIFICATION = 1.05

Index = int | slice | np.ndarray


@dataclass(frozen=True)
class StoredLayout:
    """The layout of one variable in a netCDF, HDF5 or zarr file.

    ``chunks``: what is read and decoded at once, None for an array in one piece; in a zarr shard these are the chunks
    within it, which are read one by one. ``compressed``: then the padding of a chunk that reaches beyond the end of
    the array takes no space and is not counted; stored as it is, the padding is read too.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    compressed: bool = False

    @classmethod
    def of(cls, variable: xr.Variable) -> StoredLayout:
        """Of a variable as xarray opened it, not yet indexed."""
        encoding = variable.encoding
        chunks = encoding.get("chunksizes") or encoding.get("chunks")
        filters = ("zlib", "szip", "zstd", "bzip2", "blosc", "compressors", "compressor")
        return cls(
            dims=tuple(map(str, variable.dims)),
            shape=tuple(variable.shape),
            itemsize=np.dtype(encoding.get("dtype") or variable.dtype).itemsize,
            chunks=tuple(map(int, chunks)) if chunks and not encoding.get("contiguous") else None,
            shards=tuple(map(int, encoding["shards"])) if encoding.get("shards") else None,
            compressed=any(bool(encoding.get(name)) for name in filters),
        )

    def asked(self, index: Sequence[Index]) -> int:
        """Bytes of the values wanted, as they are stored: one entry of ``index`` per dim, each taken by itself."""
        return self.itemsize * math.prod(map(_length, self.shape, index))

    def touched(self, index: Sequence[Index]) -> int:
        """Bytes, uncompressed, of the chunks that hold the values wanted; each chunk once for one read."""
        if self.chunks is None:
            if not self.asked(index):
                return 0
            return self._sieved([positions(n, part) for n, part in zip(self.shape, index, strict=True)])
        # A product over dims: values decoded along each. Chunk i of a dim of n spans i * chunk to (i + 1) * chunk.
        return self.itemsize * math.prod(map(self._decoded, self.shape, self.chunks, index))

    def _decoded(self, n: int, chunk: int, part: Index) -> int:
        if isinstance(part, slice) and part.step in (None, 1):  # at each read, so without arrays
            start, stop, _ = part.indices(n)
            if stop <= start:
                return 0
            end = -(-stop // chunk) * chunk
            return (min(end, n) if self.compressed else end) - start // chunk * chunk
        hit = np.unique(positions(n, part) // chunk)
        ends = (hit + 1) * chunk
        return int((np.minimum(ends, n) if self.compressed else ends).sum() - (hit * chunk).sum())

    def _sieved(self, places: list[np.ndarray]) -> int:
        """Bytes read of an array in one piece: from the first run on, a buffer at a time."""
        strides = self.itemsize * np.cumprod([1, *self.shape[:0:-1]])[::-1]
        starts = np.zeros(1, np.int64)
        for part, stride in zip(places[:-1], strides[:-1], strict=True):
            starts = (starts[:, None] + np.sort(part) * stride).ravel()
        if places:
            starts = starts + int(places[-1].min()) * self.itemsize
        length = self.itemsize * (int(np.ptp(places[-1])) + 1 if places else 1)
        if length >= SIEVE_BYTES:
            return length * starts.size
        total, run, size = 0, 0, self.itemsize * math.prod(self.shape)
        while run < starts.size:
            end = min(int(starts[run]) + SIEVE_BYTES, size)
            total += end - int(starts[run])
            run = int(np.searchsorted(starts + length, end, side="right"))
        return total

    def __str__(self) -> str:
        text = "one piece" if self.chunks is None else " x ".join(map(str, self.chunks))
        return text + (f" in shards of {' x '.join(map(str, self.shards))}" if self.shards else "")


def _length(n: int, part: Index) -> int:
    return len(range(*part.indices(n))) if isinstance(part, slice) else np.size(part)


def positions(n: int, part: Index) -> np.ndarray:
    """The places along a dim of ``n`` that an index picks   [k] int64, none negative"""
    if isinstance(part, slice):
        return np.arange(n)[part]
    return np.atleast_1d(np.asarray(part, dtype=np.int64)) % max(n, 1)


def tile_chunks(row_bounds: Sequence[int], column_bounds: Sequence[int], itemsize: int = 4) -> tuple[int, int]:
    """Rows and columns of the compressed chunks from which every tile is read at the least cost.

    ``row_bounds`` [polar + 1] and ``column_bounds`` [azimuth + 1]: where each tile starts, and the end. Chunks are of
    one length while tiles may differ by one: 181 rows in tiles of 90 and 91 take chunks of 90, the last of which
    holds one row. No tile takes more than ``MOST_CHUNKS`` chunks: opening more costs more than reading too much. Of
    those chunks, from which every tile reads at most 1.05 times its bytes, the cheapest; where there are none, those
    that read the least too much.
    """
    # the worst tile's length decoded, as a multiple of its own, and its number of chunks, for chunk = 1, 2, ...
    (row_lengths, row_factors, row_counts), (lengths, factors, counts) = map(_worst, (row_bounds, column_bounds))
    amplification = np.outer(row_factors, factors)
    chunks = np.outer(row_counts, counts)
    cost = itemsize * np.outer(row_lengths, lengths) + REQUEST_BYTES * chunks
    few = chunks <= MOST_CHUNKS
    good = few & (amplification <= GOOD_AMPLIFICATION)
    best = np.argmin(np.where(good, cost, np.inf) if good.any() else np.where(few, amplification, np.inf))
    rows, columns = np.unravel_index(best, cost.shape)
    return int(rows) + 1, int(columns) + 1


def _worst(bounds: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Length decoded, the same over the tile's own, and number of chunks, of the worst tile   3 x [n]"""
    count = bounds[-1]
    chunk = np.arange(1, count + 1)[:, None]
    start, stop = np.asarray(bounds[:-1]), np.asarray(bounds[1:])
    first, last = start // chunk, (stop - 1) // chunk + 1
    decoded = np.minimum(last * chunk, count) - first * chunk
    return decoded.max(axis=1), (decoded / (stop - start)).max(axis=1), (last - first).max(axis=1)
