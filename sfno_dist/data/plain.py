"""The plain layout: CF netCDF or zarr, and what the Climate Data Store, ARCO-ERA5 and CMIP make of it."""

from __future__ import annotations

import warnings

import numpy as np
import xarray as xr

from sfno_dist.data.calendars import as_gregorian, decode_times
from sfno_dist.data.contents import KEPT_ATTRIBUTES, Contents, StoredField
from sfno_dist.data.coordinates import find_horizontal, find_time, is_member, pressures, refuse_start_times
from sfno_dist.data.errors import DataError


def read_contents(dataset: xr.Dataset, path: str) -> Contents:
    """Of any file with coordinates; ``DataError`` where latitude or longitude is not found, or times not decoded."""
    points = find_horizontal(dataset, path)
    dims: dict[str, str | None] = {which: dim for which, (dim, _) in points.items()}
    name = find_time(dataset)
    dims["time"] = None
    times = np.empty(0, "datetime64[ns]")
    if name is not None:
        refuse_start_times(dataset, name, path)
        axis = dataset[name]
        for dim in axis.dims[::-1]:  # valid_time of cfgrib lies on (time, step)
            axis = axis.isel({dim: 0}) if axis.ndim > 1 and axis.sizes[dim] == 1 else axis
        dims["time"] = str(axis.dims[0]) if axis.ndim else None
        times = decode_times(np.atleast_1d(axis.values), axis.attrs, f"{path}: {name}")
    indices = _within_validity(times, dataset.attrs, path)
    return Contents(
        latitudes=points["lat"][1],
        longitudes=points["lon"][1],
        times=times[indices],
        time_indices=indices,
        dims=dims,
        fields=_fields(dataset, dims),
        absent=_absent(dataset, dims, indices),
        expver_ranks=_expver_ranks(dataset, dims["time"], indices),
    )


def _within_validity(times: np.ndarray, attributes: dict, path: str) -> np.ndarray:
    """Indices of the times that the store says it holds: the axis of ARCO-ERA5 runs on into the future."""
    if "valid_time_start" not in attributes and "valid_time_stop" not in attributes:
        return np.arange(times.size)
    try:
        start = np.datetime64(str(attributes.get("valid_time_start", "1678")))
        stop = np.datetime64(str(attributes.get("valid_time_stop", "2261")))
    except ValueError as error:
        raise DataError(f"{path}: its valid_time_start or valid_time_stop is no date ({error}); mend it") from error
    moments = as_gregorian(times)
    end = (stop + 1).astype("datetime64[ns]")  # the last day counts whole
    kept = np.flatnonzero((moments >= start) & (moments < end))
    if kept.size < times.size:
        warnings.warn(
            f"{path}: {times.size - kept.size} of {times.size} times lie outside its valid_time_start and "
            f"valid_time_stop ({start} to {stop}) and are left out",
            stacklevel=2,
        )
    return kept


def _fields(dataset: xr.Dataset, dims: dict[str, str | None]) -> dict[str, StoredField]:
    found = {}
    scalars = [x for x in map(str, dataset.variables) if dataset[x].ndim == 0]
    lone = next((levels for x in scalars if (levels := pressures(dataset[x]))), ())
    members = [x for x in scalars if is_member(dataset, x) and dataset[x].dtype.kind in "iu"]
    lone_member = (int(dataset[members[0]]),) if members else ()
    levels_of = {str(d): pressures(dataset[d]) for d in dataset.dims if d in dataset.variables}
    members_of = {str(d): _member_numbers(dataset, str(d)) for d in dataset.dims if is_member(dataset, str(d))}
    for key, variable in dataset.variables.items():
        spare = [str(d) for d in variable.dims if d not in dims.values()]
        if not {dims["lat"], dims["lon"]} <= set(variable.dims) or variable.dtype.kind not in "iufb":
            continue
        level = next((d for d in spare if levels_of.get(d)), None)
        member = next((d for d in spare if d in members_of), None)
        expver = next((d for d in spare if d.lower() == "expver"), None)
        found[str(key)] = StoredField(
            array=str(key),
            dims=tuple(map(str, variable.dims)),
            sizes=tuple(variable.shape),
            dtype=str(variable.encoding.get("dtype", variable.dtype)),
            attributes={x: str(variable.attrs[x]) for x in KEPT_ATTRIBUTES if x in variable.attrs},
            level_dim=level,
            levels=levels_of[level] if level else lone,
            member_dim=member,
            members=members_of[member] if member else lone_member,
            expver_dim=expver,
            expver_order=tuple(_expver_order(dataset, expver)) if expver else (),
        )
    return found


def _member_numbers(dataset: xr.Dataset, dim: str) -> tuple[int, ...]:
    """The members' own numbers, or their places where they have none."""
    if dim in dataset.variables and dataset[dim].dtype.kind in "iuf":
        return tuple(int(x) for x in dataset[dim].values)
    return tuple(range(dataset.sizes[dim]))


def _expver_order(dataset: xr.Dataset, dim: str) -> np.ndarray:
    """Indices along expver: ERA5 (1) before the preliminary ERA5T (5)."""
    size = dataset.sizes[dim]
    return np.argsort(_numbers(dataset[dim].values) if dim in dataset.variables else np.arange(size), kind="stable")


def _expver_ranks(dataset: xr.Dataset, time: str | None, indices: np.ndarray) -> np.ndarray | None:
    """expver of each time where it is told, so that of a time in two files the final one counts."""
    if "expver" not in dataset.variables or dataset["expver"].dims not in ((), (time,)):
        return None
    numbers = _numbers(np.atleast_1d(dataset["expver"].values))
    return np.broadcast_to(numbers, indices.shape) if numbers.size == 1 else numbers[indices]


def _numbers(values: np.ndarray) -> np.ndarray:
    def number(value: object) -> int:
        text = value.decode() if isinstance(value, bytes) else str(value)
        try:
            return int(float(text))
        except ValueError:
            return 0

    return np.array([number(value) for value in values])


def _absent(dataset: xr.Dataset, dims: dict[str, str | None], indices: np.ndarray) -> dict[str, np.ndarray]:
    """Times that a set written by this package marks as not complete, for all its fields."""
    if "complete" not in dataset.variables or dataset["complete"].dims != (dims["time"],):
        return {}
    gaps = np.flatnonzero(~dataset["complete"].values.astype(bool)[indices])
    return {"": gaps} if gaps.size else {}
