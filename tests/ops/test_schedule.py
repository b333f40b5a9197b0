"""The tiles of the CUDA kernels: nothing is left out, nothing is done twice, and the work is even."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.test_compiled import random_tables

from sfno_dist import Grid, Neighbourhood
from sfno_dist.ops import Window, schedule

SMALL_PART = 40  # neighbours of a part, in tests whose tiles have few


def tiles_of(tables):
    """What ``Window.schedule`` makes, for any tables."""
    half_widths, _, key_rows, nlon_out, nlon_in, first, columns = tables
    rows = len(half_widths)
    queries = schedule.Rows(np.full(rows, first % nlon_out), np.full(rows, columns), nlon_out)
    keys = schedule.Rows(key_rows[:, 0].numpy(), key_rows[:, 1].numpy(), nlon_in)
    of_queries, query_splits = schedule.tiles(half_widths.numpy(), queries, keys)
    of_keys, key_splits = schedule.tiles(half_widths.numpy().T, keys, queries)
    return torch.from_numpy(of_queries), torch.from_numpy(of_keys), query_splits, key_splits


@settings(deadline=None, max_examples=50)
@given(random_tables(), st.sampled_from([schedule.PART_NEIGHBOURS, SMALL_PART, 1]))
def test_tiles_hold_every_centre_and_every_neighbour_once(tables, part):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "PART_NEIGHBOURS", part)
        query_tiles, key_tiles, *splits = tiles_of(tables)
    half_widths, _, key_rows, nlon_out, nlon_in, first, columns = tables
    query_rows = torch.tensor([[first, columns, 0]]).expand(len(half_widths), 3)
    for tiles, split, widths, rows, near_rows, nlon in (
        (query_tiles, splits[0], half_widths.numpy(), query_rows, key_rows, nlon_out),
        (key_tiles, splits[1], half_widths.numpy().T, key_rows, query_rows, nlon_in),
    ):
        times = np.zeros((len(widths), nlon, widths.shape[1]), int)  # how often a centre meets a neighbour row
        for number, (row, shape, height, column, width, near, end, part_, parts) in enumerate(tiles.tolist()):
            assert shape in (1, 2, 4) and width <= 64 // shape and height <= shape and (parts > 1) == (number < split)
            assert part_ == 0 or tiles[number - 1, 7] == part_ - 1
            times[row : row + height, (column + np.arange(width)) % nlon, near:end] += 1
        for r, (start, count, _) in enumerate(rows.tolist()):
            held = (start + np.arange(count)) % nlon
            needed = (widths[r] >= 0) & (near_rows[:, 1].numpy() > 0)
            assert (times[r, held][:, needed] == 1).all() and (times <= 1).all()


def test_no_tile_near_the_poles_has_much_more_work_than_the_others():
    neighbourhood = Neighbourhood(Grid("equiangular", 181, 360), None, 0.053)
    tiles, _, splits, _ = Window.whole(neighbourhood).schedule(torch.device("cpu"))
    neighbours = []
    for row, shape, height, _, _, near, end, *_ in tiles.tolist():
        widest = neighbourhood.half_widths[row : row + height, near:end].max(0)
        neighbours.append(int(np.where(widest >= 0, np.minimum(2 * widest + 64 // shape, 360), 0).sum()))
    assert splits > 0 and max(neighbours) <= 1.5 * schedule.PART_NEIGHBOURS
    assert neighbours[splits:] == sorted(neighbours[splits:], reverse=True)
