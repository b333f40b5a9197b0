"""How the CUDA kernels cut a window: tiles of 64 centres, the ones with the most work first, the dearest in parts.

Centres are the points that results are made for (queries, or keys for dk and dv), neighbours those that are summed
over. A tile is 1 row of 64, 2 rows of 32 or 4 rows of 16 centres; what fits best differs between poles and equator.

Dims: c centre row, n neighbour row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

CENTRES = 64
BAND = 4  # rows that share one shape of tile
FIELDS = 9  # of a tile, as in csrc/attention_cuda.h
# Neighbours of one tile beyond which it is cut into parts: some 16 chunks of the kernel, so that the tiles near
# the poles, whose arcs span whole rows, neither start late nor end last.
PART_NEIGHBOURS = 1024
MOST_PARTS = 2048  # over the whole window, about: partial results take memory
TILE_COST = 64.0  # of loading and storing, in neighbours


@dataclass(frozen=True)
class Rows:
    """The rows of one side: ``counts[r]`` columns from global column ``first[r]`` on, of ``nlon`` around the circle."""

    first: np.ndarray
    counts: np.ndarray
    nlon: int


def tiles(half_widths: np.ndarray, centres: Rows, neighbours: Rows) -> tuple[np.ndarray, int]:
    """The tiles of one side for ``half_widths`` [c, n], and how many of them are parts of tiles.

    A tile [9] int32 says first_row, shape_rows, rows, first_column, columns, first_neighbour, end_neighbour, part,
    parts. Parts come first, those of one tile after another.
    """
    whole: list[np.ndarray] = []  # of each band: tiles with their candidates per neighbour row [tiles, FIELDS + n]
    for row in range(0, len(half_widths), BAND):
        shapes = [_band(half_widths, centres, neighbours, row, shape) for shape in (1, 2, 4)]
        costs = [float((band[:, FIELDS:].sum(1) + TILE_COST).sum()) for band in shapes]
        whole.append(shapes[int(np.argmin(costs))])
    table = np.concatenate(whole) if whole else np.zeros((0, FIELDS + len(neighbours.counts)), dtype=np.int64)
    work = table[:, FIELDS:].sum(1)
    table, work = (x[np.argsort(-work, kind="stable")] for x in (table, work))
    limit = max(PART_NEIGHBOURS, int(work.sum()) // MOST_PARTS)
    parted = [_parts(tile, limit) for tile in table[work > limit]]
    split = np.concatenate([parts for parts in parted if len(parts) > 1] or [table[:0, :FIELDS]])
    single = np.concatenate([parts for parts in parted if len(parts) == 1] or [table[:0, :FIELDS]])
    everything = np.concatenate([split, single, table[work <= limit, :FIELDS]])
    return everything.astype(np.int32), len(split)


def _band(half_widths: np.ndarray, centres: Rows, neighbours: Rows, row: int, shape: int) -> np.ndarray:
    """Tiles of ``shape`` rows in the band from ``row`` on, each followed by its candidates in each neighbour row."""
    ticks = math.lcm(centres.nlon, neighbours.nlon)
    step, step_near = ticks // centres.nlon, ticks // neighbours.nlon
    columns = CENTRES // shape
    tiles = []
    for first_row in range(row, min(row + BAND, len(half_widths)), shape):
        rows = slice(first_row, min(first_row + shape, row + BAND, len(half_widths)))
        start, length = _cover(centres.first[rows], centres.counts[rows], centres.nlon)
        widest = half_widths[rows].max(0).astype(np.int64)
        span = (min(columns, max(length, 1)) - 1) * step
        # Columns of each neighbour row within reach of any centre, an upper bound   [n]
        candidates = np.minimum((2 * widest + span) // step_near + 1, neighbours.counts)
        candidates = np.where(widest >= 0, candidates, 0)
        within = np.flatnonzero(candidates)
        reach = (int(within[0]), int(within[-1]) + 1) if len(within) else (0, 0)
        for column in range(0, length, columns):
            place = (start + column) % centres.nlon, min(columns, length - column)
            head = first_row, shape, rows.stop - rows.start, *place, *reach, 0, 1
            tiles.append(np.concatenate([np.asarray(head, dtype=np.int64), candidates]))
    return np.asarray(tiles, dtype=np.int64).reshape(len(tiles), FIELDS + len(neighbours.counts))


def _cover(first: np.ndarray, counts: np.ndarray, nlon: int) -> tuple[int, int]:
    """First column and length of an interval of the circle that holds every row's columns."""
    held = counts > 0
    if not held.any():
        return 0, 0
    first, counts = first[held].astype(np.int64), counts[held].astype(np.int64)
    begin = (first - first[0] + nlon // 2) % nlon - nlon // 2  # the nearest way around
    length = int((begin + counts).max() - begin.min())
    return int((first[0] + begin.min()) % nlon), min(length, nlon)


def _parts(tile: np.ndarray, limit: int) -> np.ndarray:
    """A tile cut between its neighbour rows into parts of about equal work   [parts, FIELDS]"""
    first, end = tile[5], tile[6]
    done = np.cumsum(tile[FIELDS + first : FIELDS + end])
    wanted = -(-int(done[-1]) // limit)
    cuts = np.searchsorted(done, np.arange(1, wanted) * (done[-1] / wanted)) + 1
    bounds = np.unique(np.concatenate([[0], cuts, [end - first]])) + first
    parts = np.repeat(tile[None, :FIELDS], len(bounds) - 1, axis=0)
    parts[:, 5], parts[:, 6] = bounds[:-1], bounds[1:]
    parts[:, 7], parts[:, 8] = np.arange(len(parts)), len(parts)
    return parts
