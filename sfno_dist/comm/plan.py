"""Which points of which process a tile needs: planned once, by arithmetic alone, on every process for itself.

Dims: r query row, h key row, o query column, j key column; distances along a row in ticks, see ``Neighbourhood``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sfno_dist.geometry import Neighbourhood
from sfno_dist.mesh import Decomposition

Spans = tuple[np.ndarray, np.ndarray]  # first column and number of columns of each key row, both [nlat_in]


class Reach:
    """What the queries of each tile touch of the keys' grid."""

    def __init__(self, neighbourhood: Neighbourhood, keys: Decomposition, queries: Decomposition) -> None:
        self.neighbourhood, self.keys, self.queries = neighbourhood, keys, queries
        # Widest arc in each key row over the query rows of a tile, -1 for none   [polar, nlat_in]
        self.widths = np.stack(
            [neighbourhood.half_widths[slice(*queries.row_bounds[p : p + 2])].max(0) for p in range(keys.mesh.polar)]
        ).astype(np.int64)

    @cached_property
    def distances(self) -> np.ndarray:
        """From each key column to the nearest query column of a tile, in ticks   [azimuth, nlon_in]"""
        nlon_in, nlon_out, ticks = (
            self.neighbourhood.grid_in.nlon,
            self.neighbourhood.grid_out.nlon,
            self.neighbourhood.ticks,
        )
        step = ticks // nlon_out
        key = np.arange(nlon_in, dtype=np.int64) * (ticks // nlon_in)
        result = []
        for start, stop in zip(self.queries.column_bounds[:-1], self.queries.column_bounds[1:], strict=True):
            # The nearest query of a run is the next one on either side, or an end of the run.
            nearest = np.full(nlon_in, ticks, dtype=np.int64)
            for column in (key // step, key // step + 1, np.full_like(key, start), np.full_like(key, stop - 1)):
                column = column % nlon_out
                apart = np.abs(column * step - key)
                inside = (start <= column) & (column < stop)
                nearest = np.minimum(nearest, np.where(inside, np.minimum(apart, ticks - apart), ticks))
            result.append(nearest)
        return np.stack(result)

    def touched(self, place: int, rows: slice, columns: slice) -> np.ndarray:
        """Which of these key points the tile of process ``place`` needs   bool [rows, columns]"""
        polar, azimuth = divmod(place, self.keys.mesh.azimuth)
        return self.distances[azimuth, columns][None, :] <= self.widths[polar, rows][:, None]

    def rows(self, place: int) -> tuple[int, int]:
        """The key rows that the tile of process ``place`` needs anything of: (start, stop)."""
        needed = np.nonzero(self.widths[place // self.keys.mesh.azimuth] >= 0)[0]
        return int(needed[0]), int(needed[-1]) + 1

    @cached_property
    def spans(self) -> tuple[Spans, Spans]:
        """Two runs of columns in each key row that hold all that this tile touches of other tiles.

        In a row of its own a tile's arcs reach beyond it to the west (first run) and to the east (second); of any
        other row, and of a whole ring, the first run holds everything. Where queries stand far apart a run has
        columns that no arc touches.
        """
        mesh, nlon_in, ticks = self.keys.mesh, self.neighbourhood.grid_in.nlon, self.neighbourhood.ticks
        width, step = self.widths[mesh.polar_index], ticks // nlon_in
        centre = np.asarray([self.queries.columns.start, self.queries.columns.stop - 1]) * (
            ticks // self.neighbourhood.grid_out.nlon
        )
        first = -((width - centre[0]) // step)  # ceil
        count = np.where(width < 0, 0, np.minimum((centre[1] + width) // step - first + 1, nlon_in))
        rings = count >= nlon_in
        first, count = np.where(rings, 0, first % nlon_in), np.maximum(count, 0)
        east_first, east_count = np.zeros_like(first), np.zeros_like(count)

        # Cut the tile's own columns out of its own rows, counted from the first column of the run.
        own, rows = self.keys.columns, self.keys.rows
        size = own.stop - own.start
        f, n = first[rows], count[rows]
        begin = (own.start - f) % nlon_in
        wrapped = np.maximum(begin + size - nlon_in, 0)  # own columns that come before the run's first one is reached
        west = np.maximum(np.minimum(n, begin) - wrapped, 0)
        east = np.maximum(n - begin - size, 0)
        ring = rings[rows]
        first[rows] = np.where(ring, own.stop % nlon_in, (f + wrapped) % nlon_in)
        count[rows] = np.where(ring, nlon_in - size, west)
        east_first[rows] = np.where(ring, 0, (f + begin + size) % nlon_in)
        east_count[rows] = np.where(ring, 0, east)
        return (first, count), (east_first, east_count)


@dataclass(frozen=True, eq=False)
class Plan:
    """Points that go to and come from each other process, by its place in the globe.

    ``sends``: indices among the points of this tile. ``receives``: positions among the ``points`` that are gathered
    here. ``local``: indices and positions of points that this tile gives itself. Indices are int64 tensors.
    """

    points: int
    sends: tuple[tuple[int, Tensor], ...]
    receives: tuple[tuple[int, Tensor], ...]
    local: tuple[Tensor, Tensor]
    _on_device: dict[torch.device, Plan] = field(default_factory=dict, repr=False)

    @property
    def received(self) -> int:
        """Number of points that come from other processes."""
        return sum(len(positions) for _, positions in self.receives)

    @property
    def sent(self) -> int:
        """Number of points that go to other processes, a point once for each; as many gradients come home."""
        return sum(len(index) for _, index in self.sends)

    def on(self, device: torch.device) -> Plan:
        """The plan with its indices on ``device``."""
        if device not in self._on_device:

            def moved(messages):
                return tuple((place, index.to(device)) for place, index in messages)

            local = self.local[0].to(device), self.local[1].to(device)
            self._on_device[device] = Plan(self.points, moved(self.sends), moved(self.receives), local)
        return self._on_device[device]


Needed = Callable[[int, slice, slice], np.ndarray]  # place, rows, columns -> bool [rows, columns]


def _plan(keys: Decomposition, needed: Needed, position: np.ndarray, points: int, *, own_too: bool) -> Plan:
    """The plan for what ``needed`` says of every place; ``position`` [nlat_in, nlon_in] says where a point goes."""
    here = keys.mesh.place
    sends, receives = [], []
    local = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    for place in range(keys.mesh.globe_size):
        wanted_there = np.flatnonzero(needed(place, keys.rows, keys.columns))
        rows, columns = keys.tile(place)
        wanted_here = position[rows, columns][needed(here, rows, columns)]
        if place != here:
            sends.append((place, torch.from_numpy(wanted_there)))
            receives.append((place, torch.from_numpy(wanted_here)))
        elif own_too:
            local = torch.from_numpy(wanted_there), torch.from_numpy(wanted_here)
    return Plan(
        points,
        tuple((place, index) for place, index in sends if len(index)),
        tuple((place, index) for place, index in receives if len(index)),
        local,
    )


def halo_plan(reach: Reach) -> Plan:
    """For the points that a tile's arcs touch beyond the tile, gathered in ``Reach.spans`` row after row."""
    position = np.full(reach.neighbourhood.grid_in.shape, -1, dtype=np.int64)
    points = 0
    for first, count in reach.spans:
        starts = points + np.cumsum(count) - count
        # Distance eastward from the first column of the run   [nlat_in, nlon_in]
        along = (np.arange(position.shape[1])[None, :] - first[:, None]) % position.shape[1]
        position = np.where(along < count[:, None], starts[:, None] + along, position)
        points += int(count.sum())
    return _plan(reach.keys, reach.touched, position, points, own_too=False)


def latitude_plan(reach: Reach) -> Plan:
    """For the tile's own columns of all key rows within reach, gathered row after row."""
    keys = reach.keys

    def needed(place: int, rows: slice, columns: slice) -> np.ndarray:
        start, stop = reach.rows(place)
        own = keys.tile(place)[1]
        row, column = np.arange(rows.start, rows.stop), np.arange(columns.start, columns.stop)
        return ((start <= row) & (row < stop))[:, None] & ((own.start <= column) & (column < own.stop))[None, :]

    start, stop = reach.rows(keys.mesh.place)
    size = keys.columns.stop - keys.columns.start
    row, column = np.arange(reach.neighbourhood.grid_in.nlat)[:, None], np.arange(reach.neighbourhood.grid_in.nlon)
    position = (row - start) * size + (column - keys.columns.start)[None, :]
    return _plan(keys, needed, position, (stop - start) * size, own_too=True)
