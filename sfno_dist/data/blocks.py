"""How fields lie in the arrays of a file, and how the blocks are read that hold some of their points."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from sfno_dist.data.contents import StoredField
from sfno_dist.data.layout import StoredLayout
from sfno_dist.data.ledger import LEDGER
from sfno_dist.data.stored import StoredArray

# More parts of rows or columns than this are read as one block and picked from it.
MOST_PARTS = 3


@dataclass(frozen=True)
class Together:
    """Fields of one array that share chunks: one block holds them all, so that each chunk is decoded once.

    ``field`` is one of them; they lie at ``places`` along the dim ``along`` (None for a field by itself) and are
    number ``numbers`` of those wanted. ``may_miss``: whether they may lack values.
    """

    field: StoredField
    numbers: tuple[int, ...]
    along: str | None = None
    places: tuple[int, ...] = (0,)
    may_miss: bool = False

    @cached_property
    def targets(self) -> slice | np.ndarray:
        """``numbers`` as an index."""
        return _as_slice(np.array(self.numbers))

    @cached_property
    def within(self) -> slice | np.ndarray:
        """Where the fields lie in a block that begins with the first of them."""
        return _as_slice(np.array(self.places) - min(self.places))


def together(
    fields: Iterable[tuple[StoredField, bool]], layout_of: Callable[[StoredField], StoredLayout]
) -> list[Together]:
    """Groups (field, whether it may lack values) by the chunks that hold them."""
    found: dict[tuple, Together] = {}
    for number, (field, may_miss) in enumerate(fields):
        along, chunk = _shared_dim(field, layout_of(field))
        place = dict(field.fixed)[along] if along else 0
        others = tuple(sorted(pair for pair in field.fixed if pair[0] != along))
        key = (field.array, others, may_miss, place // chunk) if along else (number,)
        one = Together(field, (number,), along, (place,), may_miss)
        held = found.get(key)
        if held is not None:
            one = replace(one, numbers=(*held.numbers, number), places=(*held.places, place))
        found[key] = one
    return list(found.values())


def _shared_dim(field: StoredField, layout: StoredLayout) -> tuple[str | None, int]:
    """The dim of variables, levels or members of which a chunk holds the most, and how many."""
    if layout.chunks is None or field.expver_dim is not None:
        return None, 1
    lengths = dict(zip(field.dims, map(min, layout.chunks, layout.shape), strict=True))
    longest = max((d for d, _ in field.fixed if lengths.get(d, 1) > 1), key=lengths.__getitem__, default=None)
    return longest, lengths.get(longest, 1) if longest else 1


@dataclass(frozen=True)
class BlockReader:
    """Reads by indices of the file; ``dims`` names those of time, lat and lon, ``shape`` is that of the points.

    ``cell_dim`` is the one dim of a flattened grid, ``by_column`` whether the latitude varies fastest along it.
    """

    path: str
    dims: dict[str, str | None]
    shape: tuple[int, int]
    cell_dim: str | None
    by_column: bool

    def fill(self, values: np.ndarray, array: StoredArray, fields: Together, at: tuple) -> None:
        """Puts fields at ``at`` = (times or None, rows, columns) into their places in ``values`` [t, v, H, W]."""
        field = fields.field
        if field.expver_dim is None:
            self._join(values, array, fields, at)
            return
        # Where the final data (the first) have a gap the preliminary ones count.
        for rank, index in enumerate(field.expver_order):
            one = replace(field, fixed=(*field.fixed, (field.expver_dim, index)), expver_dim=None)
            read = np.empty((len(values), 1, *values.shape[2:]), np.float32)
            self._join(read, array, replace(fields, field=one, numbers=(0,), may_miss=True), at)
            mine, new = values[:, fields.numbers[0]], read[:, 0]
            if rank == 0:
                mine[...] = new
            else:
                gaps = np.isnan(mine)
                mine[gaps] = new[gaps]
            if not np.isnan(mine).any():
                return

    def _join(self, values: np.ndarray, array: StoredArray, fields: Together, at: tuple) -> None:
        """Joins the blocks of neighbouring times, rows and columns that the indices make."""
        times, rows, columns = at
        chunks, time_dim = array.layout.chunks, self.dims["time"]
        time_chunk = chunks[fields.field.dims.index(time_dim)] if chunks and times is not None else 1
        in_time = [(slice(len(values)), None, slice(None))] if times is None else _parts(times.tobytes(), time_chunk)
        parts = (in_time, _parts(rows.tobytes(), None), _parts(columns.tobytes(), None))
        for (at_times, time, t), (at_rows, row, r), (at_columns, column, c) in itertools.product(*parts):
            count = 1 if times is None else at_times.stop - at_times.start
            lengths = (at_rows.stop - at_rows.start, at_columns.stop - at_columns.start)
            wanted = count * len(fields.numbers) * lengths[0] * lengths[1]
            block = self._read(array, fields, (time, row, column), wanted)
            # One index at a time: two arrays of indices would be taken together.
            values[at_times, fields.targets, at_rows, at_columns] = block[t][:, fields.within][:, :, r][:, :, :, c]

    def _read(self, array: StoredArray, fields: Together, part: tuple, wanted: int) -> np.ndarray:
        """The one place where values are read   [times, variables, rows, columns], of the file's type

        One block of one array, at the slices ``part`` of the file; ``wanted`` of its values were asked for.
        """
        times, rows, columns = part
        nlat, nlon = self.shape
        field, by_dim = fields.field, {}
        if times is not None:
            by_dim[self.dims["time"]] = times
        if fields.along:
            by_dim[fields.along] = slice(min(fields.places), max(fields.places) + 1)
        if self.cell_dim is None:
            by_dim |= {self.dims["lat"]: rows, self.dims["lon"]: columns}
        else:
            slow, length = (columns, nlat) if self.by_column else (rows, nlon)
            by_dim[self.cell_dim] = slice(slow.start * length, slow.stop * length)
        fixed = {d: slice(place, place + 1) for d, place in field.fixed}
        key = tuple(by_dim.get(d) or fixed[d] for d in field.dims)
        block = LEDGER.read(array, key, path=self.path, name=field.array, wanted=wanted, may_miss=fields.may_miss)
        rest = [axis for axis, d in enumerate(field.dims) if d not in by_dim]
        block = block.transpose(*rest, *(field.dims.index(d) for d in by_dim))
        lead = [_length(times), _length(by_dim.get(fields.along))]
        if self.cell_dim is None:
            return block.reshape(*lead, *block.shape[-2:])
        if self.by_column:
            return block.reshape(*lead, -1, nlat).swapaxes(2, 3)[:, :, rows]
        return block.reshape(*lead, -1, nlon)[..., columns]


def _length(part: slice | None) -> int:
    return 1 if part is None else part.stop - part.start


def _as_slice(places: np.ndarray) -> slice | np.ndarray:
    """Places one after the other as a slice, which makes a view."""
    return slice(int(places[0]), int(places[-1]) + 1) if (np.diff(places) == 1).all() else places


@lru_cache(maxsize=1024)
def _parts(places: bytes, chunk: int | None) -> list[tuple[slice, slice, slice | np.ndarray]]:
    """(places among the indices, block in the file, which of the block) for runs of neighbouring indices.

    Indices in one ``chunk`` are one run, whatever lies between them, so that it is decoded once. Without a chunk the
    indices are of points: many runs are one block.
    """
    indices = np.frombuffer(places, np.int64)
    if len(indices) == 0:
        return []
    steps = np.diff(indices)
    near = np.abs(steps) == 1
    turns = np.append(False, near[1:] & near[:-1] & (steps[1:] != steps[:-1]))[: len(steps)]
    apart = ~near | turns
    if chunk is not None:
        apart &= indices[1:] // chunk != indices[:-1] // chunk
    runs = np.split(np.arange(len(indices)), np.flatnonzero(apart) + 1)
    first, extent = int(indices.min()), int(np.ptp(indices)) + 1
    # A whole ring that begins elsewhere is one block: two would each decompress the same chunks.
    if chunk is None and (len(runs) > MOST_PARTS or (len(runs) > 1 and 2 * len(indices) > extent)):
        return [(slice(0, len(indices)), slice(first, first + extent), indices - first)]
    parts = []
    for run in runs:
        part = indices[run]
        low, high = int(part.min()), int(part.max())
        which: slice | np.ndarray = part - low
        if (np.diff(part) == 1).all():
            which = slice(None)
        elif (np.diff(part) == -1).all():
            which = slice(None, None, -1)
        parts.append((slice(int(run[0]), int(run[-1]) + 1), slice(low, high + 1), which))
    return parts
