"""Cuts of the globe: every point has one owner, splits are even or balanced, and nothing needs a process."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfno_dist import Decomposition, Grid, Neighbourhood, ProcessMesh
from sfno_dist.mesh.decomposition import balanced_bounds, even_bounds


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_every_point_has_one_owner(data):
    nlat, nlon = data.draw(st.integers(2, 800)), data.draw(st.integers(2, 1600))
    polar, azimuth = data.draw(st.integers(1, min(nlat, 9))), data.draw(st.integers(1, min(nlon, 9)))
    grid = Grid("equiangular-offset", nlat, nlon)
    owners = np.zeros(grid.shape, dtype=int)
    for rank in range(polar * azimuth):
        tile = Decomposition(grid, ProcessMesh.on_paper(1, polar, azimuth, rank=rank))
        owners[tile.rows, tile.columns] += 1
        assert tile.tile_shape == owners[tile.rows, tile.columns].shape and min(tile.tile_shape) >= 1
        assert tile.tile(rank) == (tile.rows, tile.columns)
    assert (owners == 1).all()


def test_even_bounds_differ_by_one_at_most():
    for count in range(1, 150):
        for parts in range(1, count + 1):
            lengths = np.diff(even_bounds(count, parts))
            assert lengths.sum() == count and lengths.max() - lengths.min() <= 1


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 12))
def test_balanced_bounds_are_the_best_there_are(work, parts):
    parts = min(parts, len(work))
    bounds = balanced_bounds(work, parts)
    assert bounds[0] == 0 and bounds[-1] == len(work) and len(bounds) == parts + 1 and min(np.diff(bounds)) >= 1
    # best[p][i]: the least costliest share when the first i rows go to p processes
    best = [[0] + [10**9] * len(work)]
    for _ in range(parts):
        best.append(
            [10**9] + [min(max(best[-1][j], sum(work[j:i])) for j in range(i)) for i in range(1, len(work) + 1)]
        )
    assert max(sum(work[a:b]) for a, b in itertools.pairwise(bounds)) == best[-1][-1]


def test_rows_balanced_by_work_share_the_neighbours():
    grid = Grid("equiangular", 181, 360)
    work = Neighbourhood(grid, theta_cutoff=0.053).neighbours_per_row()
    shares = {}
    for balance in ("count", "work"):
        bounds = Decomposition(grid, ProcessMesh.on_paper(polar=8, row_balance=balance)).row_bounds
        pairs = np.add.reduceat(work, bounds[:-1])
        shares[balance] = pairs.max() / pairs.mean()
    assert shares["count"] > 2.0 and shares["work"] < 1.15


def test_ranks_run_along_azimuth_first_then_polar_then_data():
    places = [
        (m.data_index, m.polar_index, m.azimuth_index)
        for m in (ProcessMesh.on_paper(2, 3, 4, rank=rank) for rank in range(24))
    ]
    assert places == [(d, p, a) for d in range(2) for p in range(3) for a in range(4)]


def test_fields_of_another_shape_are_named():
    tile = Decomposition(Grid("equiangular", 13, 24), ProcessMesh.on_paper(polar=2, azimuth=3, rank=4))
    tile.check(torch.zeros(1, 5, 7, 8), "query")
    with pytest.raises(ValueError, match=r"key must be \[batch, channels, 7, 8\] for rows 6:13 and columns 8:16 of"):
        tile.check(torch.zeros(1, 5, 13, 24), "key")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ProcessMesh(polar=0), "mesh.polar must be a whole number of at least 1, got 0"),
        (lambda: ProcessMesh(polar=2, azimuth=2), "1 x 2 x 2 = 4 processes .*torchrun --nproc-per-node 4"),
        (lambda: ProcessMesh(row_balance="rows"), "row_balance must be one of count, work, got 'rows'"),
        (lambda: ProcessMesh.on_paper(polar=2, rank=2), r"rank must lie in 0\.\.1"),
        (
            lambda: Decomposition(Grid("equiangular", 4, 8), ProcessMesh.on_paper(polar=5)),
            "4 rows, fewer than the 5 processes of mesh.polar",
        ),
    ],
)
def test_impossible_layouts_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
