"""Grids and their quadrature against integrals known in closed form."""

import math

import numpy as np
import pytest
from numpy.polynomial import legendre

from sfno_dist import Grid
from sfno_dist.geometry import GridError

KINDS = ["equiangular", "equiangular-offset", "legendre-gauss", "lobatto"]


def degree_of_rule(kind: str, nlat: int) -> int:
    """The highest degree of polynomials in cos colatitude that the rule integrates exactly."""
    interpolatory = nlat - 1 if nlat % 2 == 0 else nlat  # symmetric rules gain one degree for odd counts
    return {"legendre-gauss": 2 * nlat - 1, "lobatto": 2 * nlat - 3}.get(kind, interpolatory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nlat", [2, 3, 4, 5, 12, 13, 32, 73])
def test_weights_integrate_polynomials_to_the_degree_of_the_rule(kind, nlat):
    grid = Grid(kind, nlat, 2 * nlat)
    x = np.cos(grid.colatitudes)
    degree = degree_of_rule(kind, nlat)
    integrals = legendre.legvander(x, degree).T @ grid.weights  # of P_l over [-1, 1]: 2 for l = 0, else 0
    assert integrals == pytest.approx([2.0] + [0.0] * degree, abs=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_rule_is_not_exact_beyond_its_degree(kind):
    grid = Grid(kind, 6, 12)
    beyond = degree_of_rule(kind, 6) + 1
    assert abs(legendre.legval(np.cos(grid.colatitudes), [0] * beyond + [1]) @ grid.weights) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(12, 24), (13, 20), (91, 180), (721, 1440)])
def test_areas_are_positive_and_sum_to_the_sphere(kind, shape):
    grid = Grid(kind, *shape)
    assert np.all(grid.cell_areas > 0)
    assert grid.cell_areas.sum() * grid.nlon == pytest.approx(4 * math.pi, rel=1e-13)
    assert grid.area_shares.shape == (grid.nlat, 1)
    assert np.broadcast_to(grid.area_shares, grid.shape).sum() == pytest.approx(1.0, rel=1e-13)
    assert grid.weights.sum() == pytest.approx(2.0, rel=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_spherical_harmonics_are_orthonormal_under_the_weights(kind):
    from scipy.special import sph_harm_y

    grid = Grid(kind, 13, 26)
    theta, phi = np.meshgrid(grid.colatitudes, grid.longitudes, indexing="ij")
    basis = [sph_harm_y(n, m, theta, phi) for n in range(6) for m in range(-n, n + 1)]
    gram = np.array([[np.sum(a * b.conj() * grid.cell_areas[:, None]) for b in basis] for a in basis])
    np.testing.assert_allclose(gram, np.eye(len(basis)), atol=1e-12)


def test_grids_are_symmetric_about_the_equator_and_run_north_to_south():
    for kind in KINDS:
        grid = Grid(kind, 18, 36)
        np.testing.assert_allclose(grid.colatitudes + grid.colatitudes[::-1], np.pi, atol=1e-14)
        np.testing.assert_allclose(grid.weights, grid.weights[::-1], atol=1e-15)
        assert grid.latitudes_degrees[0] > 0 and np.all(np.diff(grid.colatitudes) > 0)


def test_gaussian_latitudes_are_the_published_ones():
    # ECMWF's table of the N32 Gaussian grid: first and last latitudes of the northern hemisphere.
    latitudes = Grid("legendre-gauss", 64, 128).latitudes_degrees
    assert latitudes[:3] == pytest.approx([87.8638, 85.0965, 82.3129], abs=5e-5)
    assert latitudes[31] == pytest.approx(1.3953, abs=5e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("south_first", [False, True])
@pytest.mark.parametrize("start", [0.0, -180.0, 20.0, 0.5, 1.25, -178.75])
def test_coordinates_lead_back_to_the_grid(kind, south_first, start):
    grid = Grid(kind, 73, 144)
    latitudes = np.round(grid.latitudes_degrees, 3).astype(np.float32)
    latitudes = latitudes[::-1] if south_first else latitudes
    found = Grid.from_coordinates(latitudes, (start + grid.longitudes_degrees).astype(np.float32))
    assert (found.kind, found.shape) == (kind, grid.shape)
    assert found.first_longitude == pytest.approx(start % 2.5, abs=1e-6)


def test_other_latitudes_are_weighed_by_the_area_of_their_rows():
    full = Grid("equiangular", 721, 1440)
    grid = Grid.from_coordinates(full.latitudes_degrees[:-1], full.longitudes_degrees)
    assert grid.kind == "irregular" and grid.shape == (720, 1440)
    assert grid.cell_areas.sum() * grid.nlon == pytest.approx(4 * math.pi, rel=1e-14)
    # The last row (89.75 S) reaches from 89.625 S to the pole: a cap of area 2 pi (1 - cos 0.375 deg).
    assert grid.cell_areas[-1] * grid.nlon == pytest.approx(2 * math.pi * (1 - math.cos(math.radians(0.375))))
    assert np.all(np.diff(grid.colatitudes) > 0)
    assert Grid.from_coordinates(full.latitudes_degrees[:-1][::-1], full.longitudes_degrees) == grid


@pytest.mark.parametrize(
    ("lat", "lon", "words"),
    [
        (np.linspace(60, 30, 31), np.arange(0, 360, 1.0), "not global"),
        (np.linspace(90, 0, 31), np.arange(0, 360, 1.0), "not global"),
        (np.linspace(90, -90, 31), np.arange(0, 180, 1.0), "the grid is not global: longitudes"),
        (np.linspace(90, -90, 31), np.linspace(0, 360, 37), "the grid is not global: longitudes"),
        (np.array([90.0, 0.0, 45.0, -90.0]), np.arange(0, 360, 10.0), "rise or fall"),
        (np.array([90.0, np.nan, -90.0]), np.arange(0, 360, 10.0), "finite"),
        (np.array([0.0, 90.0, 180.0]), np.arange(0, 360, 10.0), "-90..90"),
    ],
)
def test_coordinates_that_are_no_global_grid_are_refused(lat, lon, words):
    with pytest.raises(GridError, match=words):
        Grid.from_coordinates(lat, lon)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gaussian", 12, 24), "unknown grid kind 'gaussian'; choose one of equiangular"),
        (("irregular", 12, 24), "from_coordinates"),
        (("equiangular", 1, 24), "nlat must be a whole number of at least 2, got 1"),
        (("equiangular", 12, 2.5), "nlon"),
        (("equiangular", 12, 24, 360.0), "first_longitude"),
        (("equiangular", 12, 24, -1.0), "first_longitude"),
    ],
)
def test_impossible_grids_are_refused(arguments, words):
    with pytest.raises(GridError, match=words):
        Grid(*arguments)
