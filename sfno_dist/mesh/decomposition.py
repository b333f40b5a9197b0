"""Which rows and columns of a grid each process owns. Pure arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from sfno_dist.geometry import Grid, Neighbourhood
from sfno_dist.mesh.process_mesh import ProcessMesh

# Rows on either side that attention reaches, where only the grid is known and no layer. At a pole row a reach of
# one row weighs more than a larger one, which gives the rows around it the whole ring as well.
TYPICAL_REACH = 3


class Decomposition:
    """The cut of ``grid`` into polar x azimuth tiles, and the tile of this process.

    ``row_bounds`` [polar + 1] and ``column_bounds`` [azimuth + 1] hold where each tile starts, and the end; ``rows``
    and ``columns`` are the slices of the global field that this process owns. Splits may be uneven.

    Args:
        row_work: cost of each row; the costliest process gets as little as can be. By default every row costs the
            same, or what attention over a few rows costs where the mesh balances rows by work.

    Raises ``ValueError`` where there are fewer rows or columns than processes.
    """

    def __init__(self, grid: Grid, mesh: ProcessMesh, *, row_work: ArrayLike | None = None) -> None:
        for name, count, parts in (("rows", grid.nlat, mesh.polar), ("columns", grid.nlon, mesh.azimuth)):
            if parts > count:
                axis = "polar" if name == "rows" else "azimuth"
                raise ValueError(
                    f"{grid} has {count} {name}, fewer than the {parts} processes of mesh.{axis}; lower mesh.{axis}"
                )
        if row_work is None and mesh.row_balance == "work" and mesh.polar > 1:
            spacing = float(np.diff(grid.colatitudes).max())
            row_work = Neighbourhood(grid, theta_cutoff=TYPICAL_REACH * spacing).neighbours_per_row()
        self.grid, self.mesh = grid, mesh
        self.row_bounds = (
            even_bounds(grid.nlat, mesh.polar) if row_work is None else balanced_bounds(row_work, mesh.polar)
        )
        self.column_bounds = even_bounds(grid.nlon, mesh.azimuth)

    @property
    def rows(self) -> slice:
        return slice(*self.row_bounds[self.mesh.polar_index : self.mesh.polar_index + 2])

    @property
    def columns(self) -> slice:
        return slice(*self.column_bounds[self.mesh.azimuth_index : self.mesh.azimuth_index + 2])

    def tile(self, place: int) -> tuple[slice, slice]:
        """Rows and columns of another process of the same globe, by its place in it."""
        polar, azimuth = divmod(place, self.mesh.azimuth)
        return slice(*self.row_bounds[polar : polar + 2]), slice(*self.column_bounds[azimuth : azimuth + 2])

    @property
    def tile_shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    def check(self, tensor: Tensor, name: str) -> None:
        """``ValueError`` unless ``tensor`` is a field [batch, channels, rows, columns] on this process's tile."""
        height, width = self.tile_shape
        if tensor.ndim == 4 and tuple(tensor.shape[2:]) == self.tile_shape:
            return
        part = "" if self.mesh.globe_size == 1 else f"rows {_span(self.rows)} and columns {_span(self.columns)} of "
        raise ValueError(
            f"{name} must be [batch, channels, {height}, {width}] for {part}the grid {self.grid}, "
            f"got {list(tensor.shape)}"
        )

    def __repr__(self) -> str:
        return f"Decomposition({self.grid}, rows {_span(self.rows)}, columns {_span(self.columns)})"


def _span(part: slice) -> str:
    return f"{part.start}:{part.stop}"


def even_bounds(count: int, parts: int) -> tuple[int, ...]:
    """Starts of ``parts`` runs that differ by at most 1 in length, and the end."""
    return tuple(part * count // parts for part in range(parts + 1))


def balanced_bounds(work: ArrayLike, parts: int) -> tuple[int, ...]:
    """Starts of ``parts`` runs of at least one row such that the costliest run costs as little as possible."""
    # total[i] = work of the rows before i; whole numbers, so that sums compare exactly
    total = np.concatenate([[0], np.cumsum(np.asarray(work, dtype=np.int64))])
    rows = len(total) - 1
    low, high = int(np.diff(total).max()), int(total[-1])
    while low < high:
        middle = (low + high) // 2
        if len(_filled(total, middle)) - 1 <= parts:
            high = middle
        else:
            low = middle + 1
    bounds = _filled(total, low)
    # Runs left over: the rows of a run go one by one to new runs, which lowers no other's share.
    spare = [row for row in range(1, rows) if row not in set(bounds)]
    return tuple(sorted(bounds + spare[: parts + 1 - len(bounds)]))


def _filled(total: np.ndarray, most: int) -> list[int]:
    """Bounds of runs, each as long as its work stays within ``most``."""
    bounds = [0]
    while bounds[-1] < len(total) - 1:
        bounds.append(int(np.searchsorted(total, total[bounds[-1]] + most, side="right")) - 1)
    return bounds
