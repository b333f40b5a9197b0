"""Which key points a query point attends to: contiguous arcs of key rows, held as integer half-widths.

Dims: r query row, o query column, h key row, j key column.
"""

from __future__ import annotations

import copy
import hashlib
import math

import numpy as np

from sfno_dist.geometry.grid import Grid

# Points at exactly the cutoff (the next row at a cutoff of one row) are neighbours whatever the rounding.
CUTOFF_TOLERANCE = 1e-3


def effective_cutoff(theta_cutoff: float) -> float:
    """The great-circle distance in radians up to which points are neighbours."""
    return theta_cutoff * (1.0 + CUTOFF_TOLERANCE)


class Neighbourhood:
    """The points of ``grid_in`` (keys) within ``theta_cutoff`` radians of each point of ``grid_out`` (queries).

    On rings of equally spaced longitudes the neighbours in one key row are one contiguous circular arc, so
    ``half_widths`` [nlat_out, nlat_in] says everything: with ``ticks`` = lcm(nlon_in, nlon_out) around the
    circle, key (h, j) is a neighbour of query (r, o) when
    ``circular_distance(j * ticks / nlon_in, o * ticks / nlon_out) <= half_widths[r, h]``; -1 means none.

    Without ``theta_cutoff``: the largest gap between neighbouring colatitudes of the coarser grid, widened
    where needed so that every query has a neighbour.

    Raises ``ValueError`` when a query would have no neighbour, naming the row and the smallest cutoff that works.
    """

    def __init__(self, grid_in: Grid, grid_out: Grid | None = None, theta_cutoff: float | None = None) -> None:
        grid_out = grid_in if grid_out is None else grid_out
        if not math.isclose(grid_in.first_longitude, grid_out.first_longitude, abs_tol=1e-6):
            raise ValueError(
                f"the grids must start at the same longitude, got {grid_in.first_longitude:g} and "
                f"{grid_out.first_longitude:g} degrees; make the second one with first_longitude="
                f"{grid_in.first_longitude:g}"
            )
        self.grid_in, self.grid_out = grid_in, grid_out
        self.ticks = math.lcm(grid_in.nlon, grid_out.nlon)
        smallest = self._smallest_cutoff_by_row()
        if theta_cutoff is None:
            coarser = min(grid_in, grid_out, key=lambda grid: grid.nlat)
            theta_cutoff = max(float(np.diff(coarser.colatitudes).max()), float(smallest.max()))
        if not theta_cutoff > 0.0:
            raise ValueError(f"theta_cutoff is an angle in radians and must be positive, got {theta_cutoff!r}")
        self.theta_cutoff = float(theta_cutoff)
        self._refuse_empty_rows(smallest)
        self.half_widths = self._half_widths()

    def _half_widths(self) -> np.ndarray:
        """Largest neighbour distance along each key row, in ticks; -1 for none   [nlat_out, nlat_in] int32"""
        cutoff = min(effective_cutoff(self.theta_cutoff), math.pi)
        apart, sines = self._meridian_terms()
        # sin^2(dlon / 2) <= (sin^2(c / 2) - sin^2((theta_r - theta_h) / 2)) / (sin theta_r sin theta_h)
        room = math.sin(cutoff / 2.0) ** 2 - apart
        with np.errstate(divide="ignore", invalid="ignore"):
            bound = np.where(room < 0.0, np.nan, np.where(room >= sines, 1.0, room / sines))
        widest = 2.0 * np.arcsin(np.sqrt(bound))
        half = self.ticks // 2
        ticks = np.minimum(np.floor(widest * self.ticks / (2.0 * math.pi)), half)
        ticks = np.where(bound >= 1.0, half, ticks)
        if cutoff >= math.pi:
            ticks = np.full_like(ticks, half)
        return np.where(np.isnan(ticks), -1, ticks).astype(np.int32)

    def _meridian_terms(self) -> tuple[np.ndarray, np.ndarray]:
        """(sin^2((theta_r - theta_h) / 2), sin theta_r sin theta_h), the latter exactly 0 at a pole   [r, h]"""
        theta_r, theta_h = self.grid_out.colatitudes[:, None], self.grid_in.colatitudes[None, :]
        sines = np.sin(theta_r) * np.sin(theta_h)
        return np.sin((theta_r - theta_h) / 2.0) ** 2, np.where(sines < 1e-15, 0.0, sines)

    def _smallest_cutoff_by_row(self) -> np.ndarray:
        """Distance from the worst-placed query of each row to its nearest key   [nlat_out]"""
        apart, sines = self._meridian_terms()
        # Query columns fall on every tick between two key columns, the worst one halfway.
        halfway = (self.ticks // self.grid_in.nlon) // 2
        haversine = apart + sines * math.sin(math.pi * halfway / self.ticks) ** 2
        return (2.0 * np.arcsin(np.sqrt(np.minimum(haversine, 1.0)))).min(axis=1)

    def _refuse_empty_rows(self, smallest: np.ndarray) -> None:
        worst = int(np.argmax(smallest))
        if smallest[worst] > effective_cutoff(self.theta_cutoff):
            needed = math.ceil(smallest[worst] * 1e6) / 1e6
            raise ValueError(
                f"theta_cutoff={self.theta_cutoff:g} radians is below the spacing of the grids: queries of row "
                f"{worst} (latitude {self.grid_out.latitudes_degrees[worst]:.2f}) of {self.grid_out} have no "
                f"neighbour in {self.grid_in}; the smallest cutoff that works is {needed:.6f}"
            )

    def transposed(self) -> Neighbourhood:
        """The same relation seen from the keys: which queries attend to each point of ``grid_in``."""
        other = copy.copy(self)
        other.grid_in, other.grid_out = self.grid_out, self.grid_in
        other.half_widths = np.ascontiguousarray(self.half_widths.T)
        return other

    def arcs(self, row_out: int, row_in: int) -> tuple[np.ndarray, np.ndarray]:
        """First column and number of columns of key row ``row_in`` seen by each query of ``row_out``, both [nlon_out].

        The arc runs eastward from the first column in [0, nlon_in) and may pass the end of the row.
        """
        width = int(self.half_widths[row_out, row_in])
        nlon_in = self.grid_in.nlon
        centre = np.arange(self.grid_out.nlon, dtype=np.int64) * (self.ticks // self.grid_out.nlon)
        if width < 0:
            return np.zeros_like(centre), np.zeros_like(centre)
        step = self.ticks // nlon_in
        first = -((width - centre) // step)  # ceil((centre - width) / step)
        count = np.minimum((centre + width) // step - first + 1, nlon_in)
        return np.mod(first, nlon_in), count

    def neighbours_per_row(self) -> np.ndarray:
        """Number of neighbours of all queries of each row together   [nlat_out]"""
        centre = np.arange(self.grid_out.nlon, dtype=np.int64) * (self.ticks // self.grid_out.nlon)
        step = self.ticks // self.grid_in.nlon
        widths, where = np.unique(self.half_widths, return_inverse=True)
        # Keys j with |j * step - centre| <= width, at most the whole row, summed over the queries of a row.
        counts = [
            int(np.minimum((centre + w) // step + (w - centre) // step + 1, self.grid_in.nlon).sum()) if w >= 0 else 0
            for w in widths.astype(np.int64)
        ]
        return np.asarray(counts, dtype=np.int64)[where.reshape(self.half_widths.shape)].sum(axis=1)

    @property
    def checksum(self) -> str:
        """Of all that attention over it depends on, to the last digit."""
        arrays = (self.grid_in.colatitudes, self.grid_out.colatitudes, self.grid_in.cell_areas)
        numbers = repr((self.theta_cutoff, self.grid_in.nlon, self.grid_out.nlon)).encode()
        return hashlib.sha256(b"".join([numbers, *(array.tobytes() for array in arrays)])).hexdigest()[:12]

    def _key(self) -> tuple[Grid, Grid, float]:
        return self.grid_in, self.grid_out, self.theta_cutoff

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Neighbourhood) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Neighbourhood({self.grid_in} -> {self.grid_out}, theta_cutoff={self.theta_cutoff:.6g})"
