"""Area means from grid to grid: what they keep, and fields that they reproduce."""

import numpy as np
import pytest
import xarray as xr

from sfno_dist import Grid
from sfno_dist.data.regrid import area_mean


def field_on(grid: Grid, function) -> xr.DataArray:
    coordinates = {"lat": grid.latitudes_degrees, "lon": grid.longitudes_degrees}
    return xr.DataArray(function(*grid.positions), coordinates, ("lat", "lon"))


def cell_means(field: np.ndarray, grid: Grid) -> float:
    """Mean over the globe with every row counting by the band between its edges."""
    bands = -np.diff(np.cos(grid.row_edges)) / 2.0
    return float((field.mean(axis=1) * bands).sum())


SOURCE = Grid("equiangular-offset", 180, 360, 0.5)


@pytest.mark.parametrize(
    "target", [Grid("equiangular", 73, 144), Grid("legendre-gauss", 16, 32), Grid("lobatto", 300, 500)]
)
def test_the_mean_over_the_globe_stays(target):
    noise = np.random.default_rng(0).standard_normal(SOURCE.shape)
    field = xr.DataArray(noise, {"lat": SOURCE.latitudes_degrees, "lon": SOURCE.longitudes_degrees}, ("lat", "lon"))
    assert cell_means(area_mean(field, target), target) == pytest.approx(cell_means(noise, SOURCE), abs=1e-7)


@pytest.mark.parametrize("target", [Grid("equiangular", 73, 144), Grid("legendre-gauss", 64, 128)])
def test_smooth_fields_are_reproduced_poles_included(target):
    def smooth(z, x, y):
        return 2.0 + z + 0.5 * x - 0.7 * y + x * y - z * y

    result = area_mean(field_on(SOURCE, smooth), target)
    np.testing.assert_allclose(result, smooth(*target.positions), atol=0.03)


def test_a_field_on_the_same_grid_stays_as_it_is():
    field = field_on(SOURCE, lambda z, x, y: np.sin(5 * x) + z * y)
    np.testing.assert_allclose(area_mean(field, SOURCE), field.values, atol=1e-6)
