"""Open files of this process: opened when they are read, the least recently read closed, never shared.

HDF5 knows neither threads nor forks, so each process opens its own handles and one thread at a time uses them. Zarr
stores have no handles; many threads read them at once. No dask: its arrays hang in forked DataLoader workers.
"""

from __future__ import annotations

import os
import resource
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import netCDF4
import numpy as np
import xarray as xr
from xarray.backends import NetCDF4DataStore

Stamp = tuple[int, int, int]
# netcdf.h: what packed numbers read as where nothing was written, unless the variable has a fill value of its own.
DEFAULT_PACKED_FILL = {
    "int16": -32767, "int32": -2147483647, "int64": -9223372036854775806,
    "uint16": 65535, "uint32": 4294967295, "uint64": 18446744073709551614,
    "float32": 9.969209968386869e36, "float64": 9.969209968386869e36,
}  # fmt: skip


def stamp(path: str, array: str | None = None) -> Stamp:
    """Size, time of change and inode of a file, or of the description of a zarr group or of an ``array`` in it."""
    if os.path.isdir(path):
        folder = path if array is None else os.path.join(path, array)
        names = (".zarray", "zarr.json") if array else (".zgroup", "zarr.json", ".zmetadata")
        path = next((x for x in (os.path.join(folder, name) for name in names) if os.path.exists(x)), folder)
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ino


class OpenFiles:
    """At most ``limit`` open netCDF files, and any zarr stores."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.RLock()
        self._opened: OrderedDict[tuple[str, Stamp], tuple[netCDF4.Dataset | None, xr.Dataset]] = OrderedDict()
        self._in_use: list[str] = []  # by this thread, which holds the lock
        self._unwanted: deque[str] = deque()
        self._inherited: list = []
        # A fork waits until no thread is within HDF5; the child begins with no handle and a lock of its own.
        os.register_at_fork(
            before=lambda: self._lock.acquire(),
            after_in_parent=lambda: self._lock.release(),
            after_in_child=self._forked,
        )

    @contextmanager
    def dataset(self, path: str) -> Iterator[xr.Dataset]:
        """The lazy contents of a file as it is now, for use within the ``with`` block and by no other thread."""
        with self._lock:
            self._close_unwanted()
            key = (path, stamp(path))
            if key not in self._opened:
                self._forget(path)
                self._opened[key] = _open(path)
            self._opened.move_to_end(key)
            handle, dataset = self._opened[key]
            self._close_oldest()
            if handle is not None:
                self._in_use.append(path)
                try:
                    yield dataset
                finally:
                    self._in_use.pop()
                return
        yield dataset

    def close(self, path: str) -> None:
        """Closes a file whose last reader is gone, so that others may write it: now, or once no thread reads.

        Never waits: garbage is collected in any thread, also in one that the lock's owner is waiting for.
        """
        self._unwanted.append(path)
        if self._lock.acquire(blocking=False):
            try:
                self._close_unwanted()
            finally:
                self._lock.release()

    def _close_unwanted(self) -> None:
        while self._unwanted and self._unwanted[0] not in self._in_use:
            self._forget(self._unwanted.popleft())

    def _forget(self, path: str) -> None:
        for key in [key for key in self._opened if key[0] == path]:
            _close(self._opened.pop(key)[0])

    def _close_oldest(self) -> None:
        while len(self._opened) > self.limit:
            _close(self._opened.popitem(last=False)[1][0])

    def _forked(self) -> None:
        # Kept unclosed: closing a handle in the child would take the parent's lock off the file.
        self._inherited.append(self._opened)
        self._opened, self._in_use, self._lock = OrderedDict(), [], threading.RLock()
        self._unwanted = deque()


def _close(handle: netCDF4.Dataset | None) -> None:
    if handle is not None:
        handle.close()


def _limit() -> int:
    """A quarter of the files that this process may open, at most 64."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 64 if soft == resource.RLIM_INFINITY else max(1, min(64, soft // 4))


open_files = OpenFiles(_limit())


def _open(path: str) -> tuple[netCDF4.Dataset | None, xr.Dataset]:
    """The handle to close, and variables decoded but for times, each read when it is asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fill values that do not fit the packed type: such files are common
        if os.path.isdir(path):
            # Of each array its own description: consolidated ones go stale when a store is appended to.
            return None, _decoded(
                xr.open_dataset(path, engine="zarr", consolidated=False, chunks=None, decode_cf=False)
            )
        handle = netCDF4.Dataset(path)
        try:
            return handle, _decoded(
                xr.open_dataset(NetCDF4DataStore(handle), chunks=None, decode_cf=False, cache=False)
            )
        except BaseException:
            handle.close()
            raise


def _decoded(raw: xr.Dataset) -> xr.Dataset:
    for name in raw.variables:
        _mend_fill(raw[name])
    return xr.decode_cf(raw, decode_times=False, decode_coords=False, decode_timedelta=False)


def _mend_fill(stored: xr.DataArray) -> None:
    """Codes of missing values as xarray takes them: of the variable's own type, and those netCDF implies."""
    attributes, dtype = stored.attrs, stored.dtype
    is_zarr = "preferred_chunks" in stored.encoding and "filters" in stored.encoding
    for code in ("_FillValue", "missing_value"):
        value = attributes.get(code)
        if value is None:
            continue
        numbers = np.atleast_1d(np.asarray(value))
        if dtype.kind in "iu" and numbers.dtype.kind == "f":
            # NaN marks nothing among integers; 1e20 neither.
            numbers = numbers[np.isfinite(numbers) & (numbers == np.round(numbers))]
            limits = np.iinfo(dtype)
            numbers = numbers[(numbers >= limits.min) & (numbers <= limits.max)]
        if numbers.size == 0 or (dtype.kind in "iuf" and numbers.dtype.kind not in "iuf"):
            del attributes[code]
        elif dtype.kind in "iuf" and numbers.dtype != dtype and "_Unsigned" not in attributes:
            with np.errstate(over="ignore"):
                attributes[code] = numbers.astype(dtype)[0] if numbers.size == 1 else numbers.astype(dtype)
    # Format 2 of zarr has a fill value always, and 0 in it is a value as good as any.
    if is_zarr and attributes.get("_FillValue") == 0:
        del attributes["_FillValue"]
    packed = "scale_factor" in attributes or "add_offset" in attributes
    if packed and not is_zarr and "_FillValue" not in attributes:
        fill = DEFAULT_PACKED_FILL.get(dtype.name)
        if fill is not None and "_Unsigned" not in attributes:
            attributes["_FillValue"] = dtype.type(fill)
