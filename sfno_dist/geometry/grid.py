"""Grids on the sphere: rows of constant colatitude, columns at equally spaced longitudes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from sfno_dist.geometry import equiangular, gaussian

#: nlat -> (colatitudes [nlat] in radians, quadrature weights [nlat] over cos colatitude)
RULES: dict[str, Callable[[int], tuple[np.ndarray, np.ndarray]]] = {
    "equiangular": equiangular.pole_to_pole,
    "equiangular-offset": equiangular.cell_centres,
    "legendre-gauss": gaussian.legendre_gauss,
    "lobatto": gaussian.lobatto,
}
IRREGULAR = "irregular"
# Coordinates are stored in float32 or rounded to a few decimals; kinds differ by a quarter of a spacing.
SAME_POINT = 0.01  # of a spacing


class GridError(ValueError):
    """Coordinates or sizes that make no global grid. One line: what was given, expected, and what to do."""


@dataclass(frozen=True)
class Grid:
    """A global grid of ``nlat`` rows (north to south) and ``nlon`` columns (eastward).

    Kinds, with the quadrature rule behind ``weights``:

    | kind                   | latitudes                                      | quadrature       |
    |------------------------|------------------------------------------------|------------------|
    | ``equiangular``        | equally spaced, both poles                     | Clenshaw-Curtis  |
    | ``equiangular-offset`` | equally spaced cell centres, no poles          | Fejer            |
    | ``legendre-gauss``     | Gaussian latitudes                             | Gauss-Legendre   |
    | ``lobatto``            | Gaussian latitudes with both poles             | Gauss-Lobatto    |
    | ``irregular``          | any other, from ``from_coordinates``           | area of each row |

    ``first_longitude`` (degrees) is that of column 0. Raises ``GridError``.
    """

    kind: str
    nlat: int
    nlon: int
    first_longitude: float = 0.0
    irregular_latitudes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in RULES and (self.kind != IRREGULAR or self.irregular_latitudes is None):
            raise GridError(
                f"unknown grid kind {self.kind!r}; choose one of {', '.join(RULES)} "
                f"(grids of other latitudes come from Grid.from_coordinates)"
            )
        for name, count in (("nlat", self.nlat), ("nlon", self.nlon)):
            if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or count < 2:
                raise GridError(f"{name} must be a whole number of at least 2, got {count!r}")
        if not 0.0 <= self.first_longitude < 360.0:
            raise GridError(f"first_longitude must lie in [0, 360) degrees, got {self.first_longitude}")

    @cached_property
    def _rule(self) -> tuple[np.ndarray, np.ndarray]:
        if self.irregular_latitudes is not None:
            return _rows_by_area(np.radians(90.0 - np.asarray(self.irregular_latitudes)))
        colatitudes, weights = RULES[self.kind](self.nlat)
        for array in (colatitudes, weights):
            array.setflags(write=False)
        return colatitudes, weights

    @property
    def colatitudes(self) -> np.ndarray:
        """Radians from the north pole, float64, rising   [nlat]"""
        return self._rule[0]

    @property
    def weights(self) -> np.ndarray:
        """Quadrature weights over cos colatitude, float64, sum 2   [nlat]"""
        return self._rule[1]

    @cached_property
    def longitudes(self) -> np.ndarray:
        """Radians east of Greenwich, float64, rising   [nlon]"""
        return np.radians(self.first_longitude) + 2.0 * np.pi * np.arange(self.nlon) / self.nlon

    @property
    def latitudes_degrees(self) -> np.ndarray:
        """Degrees north, falling; -30 is -30 and not the float beside it   [nlat]"""
        return np.round(90.0 - np.degrees(self.colatitudes), 10)

    @property
    def longitudes_degrees(self) -> np.ndarray:
        """Degrees east, rising   [nlon]"""
        return self.first_longitude + 360.0 * np.arange(self.nlon) / self.nlon

    @cached_property
    def cell_areas(self) -> np.ndarray:
        """Steradians that one point of each row stands for; over all points they sum to 4 pi   [nlat]"""
        return self.weights * (2.0 * np.pi / self.nlon)

    @cached_property
    def area_shares(self) -> np.ndarray:
        """Share of the globe's area that one point of each row stands for; over all points they sum to 1   [nlat, 1]"""
        return (self.cell_areas / (4.0 * np.pi))[:, None]

    @property
    def row_edges(self) -> np.ndarray:
        """Colatitudes between the rows, with the poles at both ends   [nlat + 1]"""
        return _edges(self.colatitudes)

    @cached_property
    def positions(self) -> np.ndarray:
        """Points as unit vectors (to the north pole, to 0 E, to 90 E), smooth everywhere   [3, nlat, nlon]"""
        sin_theta, cos_theta = np.sin(self.colatitudes)[:, None], np.cos(self.colatitudes)[:, None]
        longitudes = self.longitudes[None, :]
        north = np.broadcast_to(cos_theta, self.shape)
        return np.stack([north, sin_theta * np.cos(longitudes), sin_theta * np.sin(longitudes)])

    @property
    def shape(self) -> tuple[int, int]:
        return self.nlat, self.nlon

    def __str__(self) -> str:
        offset = f" from {self.first_longitude:g}E" if self.first_longitude else ""
        return f"{self.kind} {self.nlat} x {self.nlon}{offset}"

    @classmethod
    def from_coordinates(cls, lat_degrees: ArrayLike, lon_degrees: ArrayLike) -> Grid:
        """The grid whose points are these latitudes (either direction) and longitudes (any start).

        Latitudes that follow no known rule give kind ``irregular``, weighed by the area each row stands for.
        Raises ``GridError`` for coordinates that are not a global grid.
        """
        lat = np.asarray(lat_degrees, dtype=np.float64)
        first_longitude, nlon = _ring(np.asarray(lon_degrees, dtype=np.float64))
        _check_latitudes(lat)
        lat = np.sort(lat)[::-1]
        for kind, rule in RULES.items():
            latitudes = 90.0 - np.degrees(rule(lat.size)[0])
            if np.all(np.abs(latitudes - lat) <= SAME_POINT * 180.0 / lat.size):
                return cls(kind, lat.size, nlon, first_longitude)
        return cls(IRREGULAR, lat.size, nlon, first_longitude, tuple(lat.tolist()))


def _rows_by_area(colatitudes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row stands for the band between the midpoints to its neighbours; the outer ones reach the poles."""
    return colatitudes, -np.diff(np.cos(_edges(colatitudes)))


def _edges(colatitudes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], (colatitudes[1:] + colatitudes[:-1]) / 2.0, [np.pi]])


def _check_latitudes(lat: np.ndarray) -> None:
    """One dimension, strictly monotonic, and no gap at either pole wider than a row."""
    if lat.ndim != 1 or lat.size < 2 or not np.all(np.isfinite(lat)):
        raise GridError(f"latitudes must be at least 2 finite numbers in one dimension, got shape {lat.shape}")
    steps = np.diff(lat)
    if not (np.all(steps > 0) or np.all(steps < 0)):
        raise GridError("latitudes must rise or fall strictly from row to row; sort the data along latitude first")
    if np.abs(lat).max() > 90.0 + 1e-3:
        raise GridError(f"latitudes must lie within -90..90 degrees, got {lat.min():g}..{lat.max():g}")
    gap = max(90.0 - lat.max(), 90.0 + lat.min())
    if gap > 1.5 * np.abs(steps).max():
        raise GridError(
            f"the grid is not global: latitudes {lat.min():g}..{lat.max():g} leave {gap:g} degrees to a pole "
            f"at a spacing of {np.abs(steps).max():g}; give global fields"
        )


def _ring(lon: np.ndarray) -> tuple[float, int]:
    """(first longitude in [0, spacing), number of columns) of equally spaced longitudes around the globe."""
    if lon.ndim != 1 or lon.size < 2 or not np.all(np.isfinite(lon)):
        raise GridError(f"longitudes must be at least 2 finite numbers in one dimension, got shape {lon.shape}")
    spacing = 360.0 / lon.size
    turned = np.sort(np.mod(lon, 360.0))
    steps = np.diff(np.append(turned, turned[0] + 360.0))
    if np.abs(steps - spacing).max() > SAME_POINT * spacing:
        raise GridError(
            f"the grid is not global: longitudes must be equally spaced around it ({lon.size} columns {spacing:g} "
            f"degrees apart), got {lon.min():g}..{lon.max():g} with steps {steps.min():g}..{steps.max():g}"
        )
    # All columns lie at the same phase within a spacing; the mean on the circle has no seam.
    phase = np.angle(np.exp(2j * np.pi * lon / spacing).mean())
    first = float(phase / (2.0 * np.pi) * spacing)
    # A first longitude within rounding of 0 is 0; a negative one is the column before.
    first = 0.0 if abs(first) <= SAME_POINT * spacing else round(first % spacing, 9)
    return (first if first < spacing * (1.0 - SAME_POINT) else 0.0), lon.size
