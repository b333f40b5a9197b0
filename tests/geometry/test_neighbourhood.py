"""Arcs against a brute-force search over great-circle distances."""

import copy
import math
import pickle

import numpy as np
import pytest

from sfno_dist import Grid, Neighbourhood
from sfno_dist.geometry.neighbourhood import effective_cutoff

KINDS = ["equiangular", "equiangular-offset", "legendre-gauss", "lobatto"]


def unit_vectors(grid: Grid) -> np.ndarray:
    theta, phi = np.meshgrid(grid.colatitudes, grid.longitudes, indexing="ij")
    return np.stack([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], axis=-1).reshape(-1, 3)


def great_circle_distances(grid_out: Grid, grid_in: Grid) -> np.ndarray:
    """[queries, keys], by the formula that is accurate at every angle."""
    a, b = unit_vectors(grid_out)[:, None, :], unit_vectors(grid_in)[None, :, :]
    return np.arctan2(np.linalg.norm(np.cross(a, b), axis=-1), np.sum(a * b, axis=-1))


def mask_from_arcs(neighbourhood: Neighbourhood) -> np.ndarray:
    grid_in, grid_out = neighbourhood.grid_in, neighbourhood.grid_out
    mask = np.zeros((*grid_out.shape, *grid_in.shape), dtype=bool)
    for r in range(grid_out.nlat):
        for h in range(grid_in.nlat):
            for o, (first, count) in enumerate(zip(*neighbourhood.arcs(r, h), strict=True)):
                mask[r, o, h, (first + np.arange(count)) % grid_in.nlon] = True
    return mask.reshape(grid_out.nlat * grid_out.nlon, -1)


def random_cases(number: int) -> list[tuple[Grid, Grid, float]]:
    rng = np.random.default_rng(20261201)
    cases = []
    while len(cases) < number:
        ratio = len(cases) % 4
        grid_in = Grid(str(rng.choice(KINDS)), int(rng.integers(4, 16)), int(rng.integers(5, 28)))
        shape = {
            0: grid_in.shape,
            1: (2 * grid_in.nlat, 2 * grid_in.nlon),
            2: (max(2, grid_in.nlat // 2), max(2, grid_in.nlon // 2)),
            3: (int(rng.integers(4, 16)), int(rng.integers(5, 28))),
        }[ratio]
        grid_out = Grid(str(rng.choice(KINDS)), *shape)
        widest = rng.choice([0.6, 1.5, 3.3])
        default = Neighbourhood(grid_in, grid_out).theta_cutoff
        cases.append((grid_in, grid_out, float(rng.uniform(default, max(widest, default + 0.01)))))
    return cases


def assert_same_neighbours(neighbourhood: Neighbourhood) -> None:
    distances = great_circle_distances(neighbourhood.grid_out, neighbourhood.grid_in)
    cutoff = effective_cutoff(neighbourhood.theta_cutoff)
    clear = np.abs(distances - cutoff) > 1e-9  # rounding may decide the rest either way
    mask = mask_from_arcs(neighbourhood)
    assert np.array_equal(mask[clear], (distances <= cutoff)[clear])
    assert clear.mean() > 0.999
    assert np.array_equal(neighbourhood.neighbours_per_row(), mask.reshape(neighbourhood.grid_out.nlat, -1).sum(axis=1))


@pytest.mark.parametrize("case", random_cases(48), ids=lambda case: f"{case[0]} to {case[1]} at {case[2]:.2f}")
def test_arcs_equal_a_brute_force_search(case):
    grid_in, grid_out, cutoff = case
    assert_same_neighbours(Neighbourhood(grid_in, grid_out, cutoff))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cutoff", [0.2, 3.1, math.pi - 1e-6, math.pi, 3.2, 100.0])
def test_poles_and_cutoffs_around_pi(kind, cutoff):
    grid = Grid(kind, 17, 20)
    neighbourhood = Neighbourhood(grid, grid, cutoff)
    assert_same_neighbours(neighbourhood)
    if cutoff >= math.pi:
        assert neighbourhood.neighbours_per_row().sum() == (17 * 20) ** 2


def test_queries_at_a_pole_see_whole_rings():
    grid = Grid("equiangular", 13, 24)
    neighbourhood = Neighbourhood(grid, grid, 2.5 * math.pi / 12)
    for pole, rows in ((0, [0, 1, 2]), (12, [12, 11, 10])):
        for h in range(13):
            _, count = neighbourhood.arcs(pole, h)
            assert np.all(count == (24 if h in rows else 0))


def test_turning_the_globe_turns_the_arcs():
    neighbourhood = Neighbourhood(Grid("legendre-gauss", 10, 18), Grid("equiangular", 9, 27), 0.5)
    mask = mask_from_arcs(neighbourhood).reshape(9, 27, 10, 18)
    assert np.array_equal(np.roll(mask, (3, 2), axis=(1, 3)), mask)  # by 40 degrees: 3 of 27 and 2 of 18 columns
    assert np.array_equal(mask[::-1, :, ::-1], mask)  # mirrored hemispheres


@pytest.mark.parametrize("case", random_cases(12), ids=lambda case: f"{case[0]} to {case[1]} at {case[2]:.2f}")
def test_transposed_agrees(case):
    neighbourhood = Neighbourhood(*case)
    transposed = neighbourhood.transposed()
    assert transposed.grid_in == neighbourhood.grid_out and transposed.grid_out == neighbourhood.grid_in
    assert np.array_equal(mask_from_arcs(transposed), mask_from_arcs(neighbourhood).T)


@pytest.mark.parametrize(
    ("grid_in", "grid_out"),
    [
        (Grid("equiangular", 12, 24), Grid("equiangular", 40, 24)),
        (Grid("equiangular", 12, 24), Grid("equiangular-offset", 24, 48)),
        (Grid("legendre-gauss", 8, 7), Grid("legendre-gauss", 9, 40)),
        (Grid("equiangular", 12, 24), Grid("equiangular", 24, 12)),
    ],
)
def test_cutoff_below_a_spacing_is_refused_with_the_smallest_that_works(grid_in, grid_out):
    with pytest.raises(
        ValueError, match=r"below the spacing.*queries of row \d+ .*smallest cutoff that works is"
    ) as error:
        Neighbourhood(grid_in, grid_out, 1e-3)
    smallest = float(str(error.value).rsplit(" ", 1)[1])
    assert mask_from_arcs(Neighbourhood(grid_in, grid_out, smallest)).any(axis=1).all()
    # Independent of the formula: the farthest that any query is from its nearest key.
    farthest = great_circle_distances(grid_out, grid_in).min(axis=1).max()
    assert smallest == pytest.approx(farthest, rel=0.02) or smallest >= farthest
    with pytest.raises(ValueError, match="below the spacing"):
        Neighbourhood(grid_in, grid_out, 0.98 * smallest)


def test_every_row_has_neighbours_at_the_default_cutoff():
    for grid_in, grid_out, _ in random_cases(40):
        neighbourhood = Neighbourhood(grid_in, grid_out)
        assert mask_from_arcs(neighbourhood).any(axis=1).all()
    assert Neighbourhood(Grid("equiangular", 13, 24)).theta_cutoff == pytest.approx(math.pi / 12)
    down = Neighbourhood(Grid("equiangular", 24, 48), Grid("equiangular", 13, 24))
    assert down.theta_cutoff == pytest.approx(math.pi / 12)


@pytest.mark.parametrize("cutoff", [0.0, -0.1, float("nan")])
def test_cutoffs_that_are_no_angle_are_refused(cutoff):
    with pytest.raises(ValueError, match="positive"):
        Neighbourhood(Grid("equiangular", 13, 24), theta_cutoff=cutoff)


def test_grids_that_start_at_different_longitudes_are_refused():
    with pytest.raises(ValueError, match=r"first_longitude=0\.5"):
        Neighbourhood(Grid("equiangular", 13, 24, 0.5), Grid("equiangular", 13, 24))


def test_neighbourhoods_compare_by_value_and_survive_copies():
    neighbourhood = Neighbourhood(Grid("equiangular", 13, 24), None, 0.4)
    for other in (copy.deepcopy(neighbourhood), pickle.loads(pickle.dumps(neighbourhood))):
        assert other == neighbourhood and hash(other) == hash(neighbourhood)
    assert neighbourhood != Neighbourhood(Grid("equiangular", 13, 24), None, 0.41)
