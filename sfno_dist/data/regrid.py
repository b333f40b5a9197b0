"""Fields from one grid to another."""

from __future__ import annotations

import numpy as np
import xarray as xr

from sfno_dist.geometry import Grid


def area_mean(field: xr.DataArray, grid: Grid) -> np.ndarray:
    """Canonical ``field`` [lat, lon] averaged over the cells of ``grid``   [nlat, nlon] float32

    First-order conservative remapping (P. Jones, Monthly Weather Review 127, 1999): every target cell takes the mean
    of the source cells that it overlaps, by area, so that the mean over the globe stays. Rows end halfway between
    latitudes, columns halfway between longitudes.
    """
    source = Grid.from_coordinates(field.lat.values, field.lon.values)
    # Area is uniform in (cos colatitude, longitude), so overlaps factor into rows and columns.
    rows = _overlaps(-np.cos(grid.row_edges), -np.cos(source.row_edges))
    turns = 2.0 * np.pi * np.arange(-1, 2)
    columns = np.sum([_overlaps(_column_edges(grid), _column_edges(source) + turn) for turn in turns], axis=0)
    rows, columns = (x / x.sum(axis=1, keepdims=True) for x in (rows, columns))
    return (rows @ field.values.astype(np.float64) @ columns.T).astype(np.float32)


def _column_edges(grid: Grid) -> np.ndarray:
    """Longitudes between the columns   [nlon + 1]"""
    half = np.pi / grid.nlon
    return np.append(grid.longitudes - half, grid.longitudes[-1] + half)


def _overlaps(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Length that the intervals between rising edges share   [targets, sources]"""
    low = np.maximum(target[:-1, None], source[None, :-1])
    high = np.minimum(target[1:, None], source[None, 1:])
    return np.maximum(high - low, 0.0)
