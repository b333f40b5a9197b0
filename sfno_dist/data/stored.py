"""One array of an open file, read by slices straight from netCDF4 or zarr and decoded by numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import netCDF4
import numpy as np
import xarray as xr
import zarr

from sfno_dist.data.chunks import ZarrArray, inside
from sfno_dist.data.errors import DataError
from sfno_dist.data.hdf5 import HDF5Array
from sfno_dist.data.layout import StoredLayout
from sfno_dist.data.valid import valid_limits

CODES = ("_FillValue", "missing_value")


class StoredArray:
    """Its values are what xarray makes of them, without what xarray's lazy arrays cost at each read.

    ``described`` is the variable as it lies in the file, ``decoded`` the same as xarray decodes it: its type is that
    of the values. ``layout`` is for the ledger; ``on_disk`` tells which chunks are there,
    None where all are or it cannot be told.
    """

    def __init__(
        self,
        array: netCDF4.Variable | zarr.Array,
        *,
        described: xr.Variable,
        decoded: xr.Variable,
        path: str,
        name: str,
    ) -> None:
        self._array, self.dtype, self._path, self._name = array, decoded.dtype, path, name
        self.layout = StoredLayout.of(decoded)
        about, dtype = described.attrs, described.dtype
        other = {("i", "true"): "u", ("u", "false"): "i"}.get((dtype.kind, str(about.get("_Unsigned"))))
        self._signed_as = np.dtype(f"{other}{dtype.itemsize}") if other else None
        self._codes = {x for code in CODES for x in np.ravel(about.get(code, ())) if x == x}
        if self._signed_as is not None and "_FillValue" in about:
            self._codes.discard(about["_FillValue"])
            self._codes.add(np.asarray(about["_FillValue"], dtype).astype(self._signed_as)[()])
        self.on_disk: ZarrArray | HDF5Array | None
        self._get: Callable | None = None
        if isinstance(array, netCDF4.Variable):
            array.set_auto_maskandscale(False)
            # Beneath its indexing, which takes four times as long as the reading of a tile at 1 degree.
            self._get = getattr(array, "_get", None)
            _keep_one_chunk(array, self.layout)
            self.on_disk = HDF5Array.of(path, array, self._codes)
        else:
            self.on_disk = ZarrArray.of(path, name)
        self._scale, self._offset = (_number(about.get(name)) for name in ("scale_factor", "add_offset"))
        self._valid = valid_limits(
            about, self._signed_as or dtype, decoded.dtype, scale=self._scale, offset=self._offset
        )

    def read(self, key: tuple[slice, ...], *, may_miss: bool = False) -> np.ndarray:
        """The values at one slice of step 1 along each dim.

        Where chunks were never written they are NaN with ``may_miss``, else that is a ``DataError``.
        """
        absent: list = []
        if isinstance(self.on_disk, ZarrArray) and self.on_disk.coding is not None:
            values = self._decoded(self.on_disk.read(key, absent))
        else:
            values = self._decoded(self._sliced(key))
            absent = self.on_disk.absent(key) if self.on_disk is not None else absent
        for name, box in absent:
            if not may_miss and self.on_disk is not None:
                raise DataError(f"{self._path}: chunk {self._name}/{name} {self.on_disk.absent_text}")
            values = values.astype(np.result_type(values, np.float32), copy=False)
            values[inside(box, key)] = np.nan
        return values

    def _sliced(self, key: tuple[slice, ...]) -> np.ndarray:
        if self._get is None or not key:
            return np.asarray(self._array[key])
        return self._get([part.start for part in key], [part.stop - part.start for part in key], [1] * len(key))

    def _decoded(self, values: np.ndarray) -> np.ndarray:
        if self._signed_as is not None:
            values = values.astype(self._signed_as)
        if self._codes or self._scale is not None or self._offset is not None:
            values = values.astype(self.dtype)
        if self._codes:
            missing = np.zeros(values.shape, bool)
            for code in self._codes:
                missing |= values == code
            values[missing] = np.nan
        if self._scale is not None:
            values *= self._scale
        if self._offset is not None:
            values += self._offset
        if self._valid is not None:
            low, high = self._valid
            values = values.astype(np.result_type(values, np.float32), copy=False)
            values[(values < low) | (values > high)] = np.nan
        return values


def _keep_one_chunk(array: netCDF4.Variable, layout: StoredLayout) -> None:
    """A cache of one chunk, not of 16 MiB or more for each variable of each open file: a block has all of a chunk."""
    if layout.chunks is not None:
        size, slots, preemption = array.get_var_chunk_cache()
        array.set_var_chunk_cache(min(size, layout.itemsize * math.prod(layout.chunks)), slots, preemption)


def _number(attribute: Any) -> Any:
    """An attribute of one number, which some files write as an array of one."""
    return np.asarray(attribute).item() if np.ndim(attribute) else attribute
