"""The sphere: grids, their quadrature, and geodesic neighbourhoods. Pure NumPy, knows no process."""

from sfno_dist.geometry.grid import Grid, GridError
from sfno_dist.geometry.neighbourhood import Neighbourhood

__all__ = ["Grid", "GridError", "Neighbourhood"]
