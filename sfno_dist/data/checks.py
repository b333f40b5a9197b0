"""Checks of files and of the values that are read from them."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sfno_dist.data.errors import DataError

# Where netCDF was never written it reads as the library's fill value, which is finite (netcdf.h, NC_FILL_FLOAT).
DEFAULT_FILL = 9.969209968386869e36
SIGNATURES = {b"PK\x03\x04": "a ZIP archive; unpack it first", b"\x1f\x8b": "gzip-compressed; unpack it first"}


def files(paths: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
    """Files and zarr folders that paths and globs name, in order; ``DataError`` for one that names nothing."""
    found: list[str] = []
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        text = os.fspath(path)
        matches = sorted(glob.glob(text)) if glob.has_magic(text) else [text] * os.path.exists(text)
        if not matches:
            raise DataError(f"{text}: no such file, seen from {Path.cwd()}; check the path")
        found += matches
    if not found:
        raise DataError("no data files were named; name a file, a zarr folder or a glob")
    return found


def check_file(path: str) -> None:
    """``DataError`` for a file that is not netCDF or zarr, or was cut off while it was copied."""
    if os.path.isdir(path):
        markers = (".zgroup", ".zmetadata", "zarr.json")
        if not any(os.path.exists(os.path.join(path, marker)) for marker in markers):
            raise DataError(f"{path}: a folder that is no zarr group (none of {', '.join(markers)} in it)")
        return
    with open(path, "rb") as file:
        start = file.read(64)
    if start[:3] == b"CDF":
        check_netcdf3_length(path)
    elif start[:8] != b"\x89HDF\r\n\x1a\n":
        what = next((text for signature, text in SIGNATURES.items() if start.startswith(signature)), None)
        shown = start[:16].decode("ascii", "replace").split("\n")[0]
        raise DataError(f"{path}: not netCDF, HDF5 or zarr: it is {what or f'a file that starts with {shown!r}'}")


def check_netcdf3_length(path: str) -> None:
    """A truncated netCDF-3 file reads without error, the lost part as a constant: only its length tells."""
    from scipy.io import netcdf_file

    try:
        with netcdf_file(path, "r", mmap=True):
            pass
    except (ValueError, TypeError, OSError, IndexError) as error:
        raise DataError(f"{path}: shorter than its header says ({error}); copy it again") from error


def check_values(values: np.ndarray, *, variable: str, times: np.ndarray, source: str) -> None:
    """``DataError`` for NaN, infinite or never-written values; ``values`` [..., H, W] read at ``times``."""
    # One pass over good data: NaN, infinities and the default fill all make this false.
    if values.size == 0 or float(np.max(np.abs(values))) < 0.99 * DEFAULT_FILL:
        return
    kinds = {
        "NaN": np.isnan(values),
        "infinite": np.isinf(values),
        f"never written ({DEFAULT_FILL:g}, the default fill of netCDF)": np.abs(values) >= 0.99 * DEFAULT_FILL,
    }
    for kind, wrong in kinds.items():
        if wrong.any():
            moment = np.atleast_1d(times)[int(np.argmax(wrong.reshape(np.size(times), -1).any(axis=1)))]
            when = "" if np.isnat(moment) else f" at time {np.datetime_as_string(moment, 's')}"
            raise DataError(
                f"{source}: {variable} has {int(wrong.sum())} of {wrong.size} values {kind}{when}; "
                f"mend the file or choose variables without gaps"
            )
