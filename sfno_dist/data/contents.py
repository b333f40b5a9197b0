"""What a file holds, told alike for every layout of files."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

#: attributes of a variable that are passed on
KEPT_ATTRIBUTES = ("units", "long_name", "standard_name", "cell_methods", "GRIB_stepType")


@dataclass(frozen=True)
class StoredField:
    """A variable and where it lies: in ``array`` with ``dims``, at one index of the dims that ``fixed`` names.

    ``level_dim`` runs over ``levels`` (hPa); without it the one level lies beside the variable. ``member_dim`` runs
    over ``members``; without it the one member, if told, lies beside the variable. ``expver_order`` gives the
    indices along ``expver_dim``, the one that counts first.
    """

    array: str
    dims: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    attributes: dict = field(default_factory=dict)
    fixed: tuple[tuple[str, int], ...] = ()
    level_dim: str | None = None
    levels: tuple[float, ...] = ()
    member_dim: str | None = None
    members: tuple[int, ...] = ()
    expver_dim: str | None = None
    expver_order: tuple[int, ...] = ()

    @property
    def size_of(self) -> dict[str, int]:
        return dict(zip(self.dims, self.sizes, strict=True))


@dataclass
class Contents:
    """Points, times and fields of one file, in the file's order.

    ``dims`` names the dims of lat, lon and time (None where a file has no such dim). A flattened grid has one dim for
    lat and lon, ``cell_dim``, with the longitudes (or, with ``cells_by_column``, the latitudes) varying fastest.
    ``absent`` gives, for each field, the times that the file itself declares missing.
    """

    latitudes: np.ndarray
    longitudes: np.ndarray
    times: np.ndarray
    time_indices: np.ndarray
    dims: dict[str, str | None]
    fields: dict[str, StoredField]
    cell_dim: str | None = None
    cells_by_column: bool = False
    absent: dict[str, np.ndarray] = field(default_factory=dict)
    expver_ranks: np.ndarray | None = None
