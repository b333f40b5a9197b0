"""The layout of NVIDIA makani: HDF5 files, one a year, with all channels in ``fields[time, channel, lat, lon]``.

Channels, points and times are dimension scales in the file or stand in ``data.json`` beside it (or in ``metadata``);
``valid_data[time, channel]`` is 0 where a field is missing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import xarray as xr

from sfno_dist.data.calendars import decode_times
from sfno_dist.data.contents import Contents, StoredField
from sfno_dist.data.errors import DataError


def is_makani(dataset: xr.Dataset, path: str) -> bool:
    return any(
        x.ndim == 4 and (str(name) == "fields" or "channel" in x.dims) for name, x in dataset.variables.items()
    ) and ("channel" in dataset.variables or _description(path) is not None)


def read_contents(dataset: xr.Dataset, path: str) -> Contents:
    """``DataError`` where neither the file nor ``data.json`` names channels or points."""
    about = _description(path) or {}
    coords = about.get("coords", {})
    array = str(about.get("h5_path", "fields"))
    if array not in dataset.variables:
        raise DataError(
            f"{path}: no array {array}, which data.json names; the file holds {', '.join(map(str, dataset))}"
        )
    field = dataset[array]
    dims = [str(dim) for dim in field.dims]
    time_dim, channel_dim, lat_dim, lon_dim = dims

    def coordinate(dim: str, key: str) -> np.ndarray:
        if dim in dataset.variables:
            return dataset[dim].values
        if key not in coords:
            raise DataError(f"{path}: neither a dimension scale nor data.json gives {key} of {array}; add data.json")
        return np.asarray(coords[key])

    names = [x.decode() if isinstance(x, bytes) else str(x) for x in coordinate(channel_dim, "channel")]
    times = _times(dataset, time_dim, about, path)
    latitudes, longitudes = (coordinate(dim, key) for dim, key in ((lat_dim, "lat"), (lon_dim, "lon")))
    counts = {"times": len(times), "channels": len(names), "latitudes": len(latitudes), "longitudes": len(longitudes)}
    for (what, count), size in zip(counts.items(), field.shape, strict=True):
        if count != size:
            raise DataError(f"{path}: {count} {what} are named, {array} has {size}; mend data.json")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: the channel {', '.join(twice)} is named twice; mend data.json")
    valid = dataset["valid_data"].values.astype(bool) if "valid_data" in dataset.variables else None
    if valid is not None and valid.shape != field.shape[:2]:
        raise DataError(f"{path}: valid_data has shape {valid.shape}, {array} {field.shape[:2]} times and channels")
    units = about.get("attrs", {}).get("units", {})
    fields = {
        name: StoredField(
            array=array,
            dims=tuple(dims),
            sizes=tuple(field.shape),
            dtype=str(field.dtype),
            attributes={"units": units[name]} if isinstance(units, dict) and name in units else {},
            fixed=((channel_dim, place),),
        )
        for place, name in enumerate(names)
    }
    absent = {} if valid is None else {name: np.flatnonzero(~valid[:, place]) for place, name in enumerate(names)}
    return Contents(
        latitudes=latitudes.astype(np.float64),
        longitudes=longitudes.astype(np.float64),
        times=times,
        time_indices=np.arange(times.size),
        dims={"lat": lat_dim, "lon": lon_dim, "time": time_dim},
        fields=fields,
        absent={name: gaps for name, gaps in absent.items() if gaps.size},
    )


def _times(dataset: xr.Dataset, dim: str, about: dict, path: str) -> np.ndarray:
    """Seconds since 1970 of the scale; else the year in the file's name and the step in data.json."""
    if dim in dataset.variables:
        attributes = {"units": "seconds since 1970-01-01", **dataset[dim].attrs}
        return decode_times(dataset[dim].values, attributes, f"{path}: {dim}")
    year = re.search(r"(\d{4})", Path(path).stem)
    if year is None or not isinstance(about.get("dhours"), (int, float)):
        raise DataError(
            f"{path}: no times: needs a dimension scale, or a year in its name and dhours, a number, in data.json"
        )
    start = np.datetime64(f"{year[1]}-01-01", "ns")
    return start + np.arange(dataset.sizes[dim]) * np.timedelta64(int(about["dhours"] * 3600), "s")


def _description(path: str) -> dict | None:
    folder = Path(path).parent
    for place in (folder, folder / "metadata", folder.parent, folder.parent / "metadata"):
        if (place / "data.json").is_file():
            try:
                about = json.loads((place / "data.json").read_text())
            except ValueError as error:
                raise DataError(f"{place / 'data.json'}: is no JSON ({error}); mend it") from error
            return about if isinstance(about, dict) and isinstance(about.get("coords"), dict) else None
    return None
