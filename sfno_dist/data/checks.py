"""Checks of files before they are opened, and of the values that are read from them."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import stat
import zipfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import netCDF4
import numpy as np

from sfno_dist.data.calendars import time_text
from sfno_dist.data.errors import DataError
from sfno_dist.data.netcdf3 import Header

# Where netCDF was never written it reads as the library's fill value, which is finite.
DEFAULT_FILL = float(netCDF4.default_fillvals["f4"])
# No field of the atmosphere or ocean comes near; fill codes that files fail to declare (1e20, 1e34) lie beyond.
LARGEST = 1e15
ZARR_MARKERS = (".zgroup", ".zmetadata", "zarr.json")
HDF5_ERROR = -101  # netcdf.h, NC_EHDFERR: HDF5 failed and does not say why
HDF5 = b"\x89HDF\r\n\x1a\n"
SIGNATURES = {
    b"\x1f\x8b": "gzip-compressed; unpack it first (gunzip)",
    b"BZh": "bzip2-compressed; unpack it first (bunzip2)",
    b"\xfd7zXZ": "xz-compressed; unpack it first (unxz)",
    b"\x28\xb5\x2f\xfd": "zstd-compressed; unpack it first (unzstd)",
    b"GRIB": "a GRIB file; convert it to netCDF first (grib_to_netcdf, or cdo -f nc4 copy)",
    b"\x0e\x03\x13\x01": "an HDF4 file; convert it to netCDF first (h4toh5)",
}


def files(paths: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
    """Files and zarr folders that paths and globs name, in order; ``DataError`` for one that names nothing."""
    found: list[str] = []
    try:
        given = [os.fspath(x) for x in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    except TypeError:
        raise DataError(f"data files are named by a path, a pattern or a list of them, got {paths!r}") from None
    for path in given:
        text = os.path.expanduser(path)
        if "://" in text:
            raise DataError(f"{text}: remote stores are not read; copy the files to a disk and name them there")
        # A name is taken as it stands before its brackets are read as a pattern.
        matches = [text] if os.path.lexists(text) else sorted(glob.glob(text, recursive=True))
        folder, name = os.path.split(text)
        if not matches and os.path.isdir(folder):
            matches = sorted(glob.glob(os.path.join(glob.escape(folder), name)))
        if not matches:
            raise DataError(f"{text}: no such file, seen from {Path.cwd()}; check the path")
        found += matches
    if not found:
        raise DataError("no data files were named; name a file, a zarr folder or a glob")
    by_place: dict[str, str] = {}
    for path in found:
        by_place.setdefault(os.path.realpath(path), path)
    return list(by_place.values())


def check_file(path: str) -> None:
    """``DataError`` for a file that is not netCDF or zarr, or was cut off while it was copied."""
    try:
        if os.path.isdir(path):
            _check_folder(path)
        elif not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for, for ever
            raise DataError(f"{path}: a pipe, socket or device; write its data to a file and name that")
        else:
            _check_start(path)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: BaseException, what: str = "it") -> DataError:
    """The error of a file that the system or its library fails to read."""
    number = getattr(error, "errno", None)
    if isinstance(error, PermissionError) or number in (errno.EACCES, errno.EPERM):
        return DataError(f"{path}: permission denied; ask its owner for the right to read it (chmod a+r)")
    if number in (errno.EMFILE, errno.ENFILE):
        return DataError(f"{path}: too many files are open in this process; raise the limit (ulimit -n)")
    if number in (errno.EAGAIN, errno.ENOLCK) or (number == HDF5_ERROR and _is_locked(path)):
        return DataError(
            f"{path}: HDF5 cannot lock it (a program is writing it, or the file system has no locks); wait for the "
            f"writer, or set HDF5_USE_FILE_LOCKING=FALSE"
        )
    if number == errno.ENOENT and os.path.islink(path):
        return DataError(f"{path}: a link to {os.readlink(path)}, which does not exist; mend the link")
    if number == errno.ENOENT:
        return DataError(f"{path}: it is gone; put it back and start again")
    lines = str(error).splitlines() or [type(error).__name__]
    return DataError(f"{path}: {what} cannot be read ({lines[0]}); the file is damaged, copy it again")


def _is_locked(path: str) -> bool:
    """Whether another program holds the lock that HDF5 asks for."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.ENOLCK, errno.ENOTSUP)
    return False


def _check_folder(path: str) -> None:
    names = os.listdir(path)
    if ".zarray" in names or _is_array(os.path.join(path, "zarr.json")):
        raise DataError(f"{path}: a single zarr array; name the zarr group that holds it, {os.path.dirname(path)}")
    if any(marker in names for marker in ZARR_MARKERS):
        return
    held = [name for name in sorted(names) if name.endswith((".nc", ".nc4", ".h5", ".hdf5", ".zarr"))]
    hint = f"; to read the files in it, name {os.path.join(path, '*' + os.path.splitext(held[0])[1])}" if held else ""
    raise DataError(f"{path}: a folder that is no zarr group (none of .zgroup, .zmetadata, zarr.json in it){hint}")


def _is_array(description: str) -> bool:
    """Whether the zarr.json (format 3) of a folder is that of an array."""
    if not os.path.exists(description):
        return False
    with open(description, "rb") as file:
        try:
            return json.load(file).get("node_type") == "array"
        except (ValueError, AttributeError):
            return False  # of a damaged one zarr tells more


def _check_start(path: str) -> None:
    with open(path, "rb") as file:
        start = file.read(64)
    if start[:3] == b"CDF" and start[3:4] in (b"\x01", b"\x02", b"\x05"):
        check_netcdf3_length(path)
    elif not _is_hdf5(path, start):
        raise DataError(f"{path}: not netCDF, HDF5 or zarr: it is {_what_it_is(path, start)}")


def _is_hdf5(path: str, start: bytes) -> bool:
    """Whether the signature stands at the start or, after a user's block, at 512, 1024, 2048 ... bytes."""
    if start[:8] == HDF5:
        return True
    with open(path, "rb") as file:
        for place in (512 << n for n in range(6)):
            file.seek(place)
            if file.read(8) == HDF5:
                return True
    return False


def _what_it_is(path: str, start: bytes) -> str:
    if not start:
        return "empty; copy or download it again"
    if start.startswith(b"PK"):
        return _zip_contents(path)
    for signature, text in SIGNATURES.items():
        if start.startswith(signature):
            return text
    if not start.strip(b"\0"):
        return "nothing but zero bytes at its start; copy or download it again"
    shown = start[:24].decode("ascii", "replace").lstrip().split("\n")[0]
    page = shown.lower().startswith(("<!doctype", "<html", "<?xml", "{"))
    return f"a file that starts with {shown!r}" + ("; a web page or message was saved in its place" if page else "")


def _zip_contents(path: str) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
    except (zipfile.BadZipFile, OSError):
        return "a ZIP archive, and a damaged one; download it again"
    shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    return f"a ZIP archive of {len(names)} files ({shown}); unpack it and name the files in it"


def check_netcdf3_length(path: str) -> None:
    """A truncated netCDF-3 file reads without error, the lost part as a constant: only its length tells."""
    actual = os.path.getsize(path)
    try:
        with open(path, "rb") as file:
            promised = Header(file).length()
    except (EOFError, IndexError, MemoryError, OverflowError) as error:
        raise DataError(f"{path}: its header is cut off or damaged; the file is damaged, copy it again") from error
    if actual < promised:
        raise DataError(f"{path}: has {actual} bytes where its header promises {promised}; copy it again")


def check_fields(
    values: np.ndarray,
    variables: Sequence[str],
    *,
    times: np.ndarray,
    source: str,
    stored_as: Callable[[str], str],
    may_miss: Collection[str] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """(lowest, highest) of each variable [V], NaN aside; ``DataError`` for what is no value of a field.

    ``values`` [T, V, H, W] are those read at ``times``. NaN (but in ``may_miss``), infinite and never-written values
    are errors; in ``may_miss`` never-written ones become NaN in place. ``stored_as`` gives a variable's type in the
    file.
    """
    if values.size == 0:
        return np.full(len(variables), np.nan), np.full(len(variables), np.nan)
    # Over good data these two passes are all: NaN and infinities make the comparison false.
    lowest, highest = values.min(axis=(0, 2, 3)), values.max(axis=(0, 2, 3))
    good = (lowest > -LARGEST) & (highest < LARGEST)
    for number in np.flatnonzero(~good).tolist():
        name, mine = variables[number], values[:, number]
        known = np.fmin.reduce(mine, axis=None), np.fmax.reduce(mine, axis=None)
        if name not in may_miss or not (-LARGEST < known[0] <= known[1] < LARGEST):
            _refuse(mine, name, times=times, source=source, stored=stored_as(name), may_miss=name in may_miss)
            known = np.fmin.reduce(mine, axis=None), np.fmax.reduce(mine, axis=None)
        lowest[number], highest[number] = known
    return lowest, highest


def _refuse(values: np.ndarray, variable: str, *, times: np.ndarray, source: str, stored: str, may_miss: bool) -> None:
    """``DataError`` naming what is wrong with values   [T, H, W]; never-written ones that may be become NaN."""
    unwritten = np.abs(values) >= 0.99 * DEFAULT_FILL
    unwritten &= np.isfinite(values)
    if may_miss:
        values[unwritten] = np.nan
    kinds = [
        ("NaN", np.isnan(values) & (not may_miss)),
        ("infinite", np.isinf(values)),
        (f"never written ({DEFAULT_FILL:g}, the default fill of netCDF)", unwritten & (not may_miss)),
        (f"beyond {LARGEST:g}, a fill code that the file does not declare", (np.abs(values) >= LARGEST) & ~unwritten),
    ]
    for kind, wrong in kinds:
        if wrong.any():
            remedy = "mend the file or choose variables without gaps"
            if kind == "infinite":
                remedy = "write it anew in float32" if stored == "float16" else remedy
            else:
                remedy = (
                    f"mend the file, or name {variable} in the option 'missing' (data.fill of a training) to fill such "
                    f"values" + " (NaN, fill codes and what lies outside valid_range)" * (kind == "NaN")
                )
            raise DataError(
                f"{source}: {variable}{' (stored as float16, largest value 65504)' * (stored == 'float16')} has "
                f"{int(wrong.sum())} of {wrong.size} values {kind}{_when(wrong, times)}; {remedy}"
            )


def _when(wrong: np.ndarray, times: np.ndarray) -> str:
    """Words for the first time with a wrong value; none for a field without time."""
    if np.size(times) == 0:
        return ""
    return f" at time {time_text(times[int(np.argmax(wrong.reshape(np.size(times), -1).any(axis=1)))])}"
