"""Fields from one grid to another."""

from __future__ import annotations

import numpy as np
import xarray as xr

from sfno_dist.data.open import open_static
from sfno_dist.geometry import Grid
from sfno_dist.mesh import Decomposition, ProcessMesh


def area_mean(field: xr.DataArray, grid: Grid) -> np.ndarray:
    """Canonical ``field`` [lat, lon] averaged over the cells of ``grid``   [nlat, nlon] float32

    First-order conservative remapping (P. Jones, Monthly Weather Review 127, 1999): every target cell takes the mean
    of the source cells that it overlaps, by area, so that the mean over the globe stays. Rows end halfway between
    latitudes, columns halfway between longitudes.
    """
    source = Grid.from_coordinates(field.lat.values, field.lon.values)
    rows, columns = _weights(source, Decomposition(grid, ProcessMesh()))
    return (rows @ field.values.astype(np.float64) @ columns.T).astype(np.float32)


def static_on_tile(path: str, variable: str, tile: Decomposition) -> np.ndarray:
    """``area_mean`` of a field without time in a file, on the tile alone   [rows, columns] float32

    Reads just the points that the tile's cells overlap.
    """
    weights = []

    def overlapped(source: Grid) -> tuple[np.ndarray, np.ndarray]:
        weights.extend(_weights(source, tile))
        rows, columns = (np.flatnonzero(x.any(axis=0)) for x in weights)
        return rows, columns

    field = open_static(path, variable, window=overlapped).values.astype(np.float64)
    rows, columns = (x[:, x.any(axis=0)] for x in weights)
    return (rows @ field @ columns.T).astype(np.float32)


def _weights(source: Grid, tile: Decomposition) -> list[np.ndarray]:
    """Shares of the source's rows in the tile's rows, and of its columns   [rows, source rows], [columns, columns]"""
    # Area is uniform in (cos colatitude, longitude), so overlaps factor into rows and columns.
    grid = tile.grid
    rows = _overlaps(-np.cos(grid.row_edges), -np.cos(source.row_edges))[tile.rows]
    turns = 2.0 * np.pi * np.arange(-1, 2)
    columns = np.sum([_overlaps(_column_edges(grid), _column_edges(source) + turn) for turn in turns], axis=0)
    return [x / x.sum(axis=1, keepdims=True) for x in (rows, columns[tile.columns])]


def _column_edges(grid: Grid) -> np.ndarray:
    """Longitudes between the columns   [nlon + 1]"""
    half = np.pi / grid.nlon
    return np.append(grid.longitudes - half, grid.longitudes[-1] + half)


def _overlaps(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Length that the intervals between rising edges share   [targets, sources]"""
    low = np.maximum(target[:-1, None], source[None, :-1])
    high = np.minimum(target[1:, None], source[None, 1:])
    return np.maximum(high - low, 0.0)
