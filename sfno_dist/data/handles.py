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
from contextlib import contextmanager, suppress
from typing import Any

import netCDF4
import numpy as np
import xarray as xr
from xarray.backends import NetCDF4DataStore, ZarrStore

from sfno_dist.data.stored import StoredArray

Stamp = tuple[int, int, int]


def stamp(path: str) -> Stamp:
    """Size, time of change and inode of a file, or of the description of a zarr group."""
    if os.path.isdir(path):
        names = (".zgroup", "zarr.json", ".zmetadata")
        path = next((x for x in (os.path.join(path, name) for name in names) if os.path.exists(x)), path)
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ino


class OpenFile:
    """A file or store, and its contents as xarray describes and decodes them (``dataset``), times aside."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._arrays: dict[str, StoredArray] = {}
        self.plans: dict[tuple, Any] = {}  # what sources keep as long as the file stays as it is
        self.file: Any  # netCDF4.Dataset or zarr.Group
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fill values that do not fit the packed type: such files are common
            if os.path.isdir(path):
                # Of each array its own description: consolidated ones go stale when a store is appended to.
                store = ZarrStore.open_group(path, mode="r", consolidated=False)
                self.file = store.zarr_group
            else:
                self.file = netCDF4.Dataset(path)
            try:
                if self.closes:
                    store = NetCDF4DataStore(self.file)
                self._raw = xr.open_dataset(store, chunks=None, decode_cf=False, cache=False)
                for name in self._raw.variables:
                    _mend_fill(self._raw[name])
                self.dataset = xr.decode_cf(self._raw, decode_times=False, decode_coords=False, decode_timedelta=False)
            except BaseException:
                self.close()
                raise

    @property
    def closes(self) -> bool:
        """Whether it is a netCDF file: it has a handle, which one thread at a time may use."""
        return isinstance(self.file, netCDF4.Dataset)

    def array(self, name: str) -> StoredArray:
        if name not in self._arrays:
            described, decoded = self._raw.variables[name], self.dataset.variables[name]
            self._arrays[name] = StoredArray(
                self.file[name], described=described, decoded=decoded, path=self.path, name=name
            )
        return self._arrays[name]

    def close(self) -> None:
        if isinstance(self.file, netCDF4.Dataset):
            self.file.close()


class OpenFiles:
    """At most ``limit`` open netCDF files, and any zarr stores."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.RLock()
        self._opened: OrderedDict[tuple[str, Stamp], OpenFile] = OrderedDict()
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
    def opened(self, path: str, now: Stamp | None = None) -> Iterator[OpenFile]:
        """A file as it is now, for use within the ``with`` block and by no other thread.

        ``now`` is its stamp, where the caller has just taken it.
        """
        with self._lock:
            self._close_unwanted()
            key = (path, now or stamp(path))
            if key not in self._opened:
                self._forget(path)
                self._opened[key] = OpenFile(path)
            self._opened.move_to_end(key)
            opened = self._opened[key]
            self._close_oldest()
            if opened.closes:
                self._in_use.append(path)
                try:
                    yield opened
                finally:
                    self._in_use.pop()
                return
        yield opened

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
            self._opened.pop(key).close()

    def _close_oldest(self) -> None:
        while len(self._opened) > self.limit:
            self._opened.popitem(last=False)[1].close()

    def _forked(self) -> None:
        # Kept unclosed: closing a handle in the child would take the parent's lock off the file.
        self._inherited.append(self._opened)
        self._opened, self._in_use, self._lock = OrderedDict(), [], threading.RLock()
        self._unwanted = deque()


def _limit() -> int:
    """A quarter of the files that this process may open, at most 64."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 64 if soft == resource.RLIM_INFINITY else max(1, min(64, soft // 4))


open_files = OpenFiles(_limit())


def _mend_fill(stored: xr.DataArray) -> None:
    """Codes of missing values as xarray takes them: of the variable's own type, and those netCDF implies."""
    attributes, dtype = stored.attrs, stored.dtype
    for code in ("_FillValue", "missing_value", "scale_factor", "add_offset"):
        if isinstance(attributes.get(code), str) and dtype.kind in "iuf":
            with suppress(ValueError):  # a number written as text, which none of them should be
                attributes[code] = float(attributes[code])
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
        # What numbers read as where nothing was written. Bytes have no such code: all of them are values.
        fill = netCDF4.default_fillvals.get(dtype.str[1:])
        if fill is not None and dtype.itemsize > 1 and "_Unsigned" not in attributes:
            attributes["_FillValue"] = dtype.type(fill)
