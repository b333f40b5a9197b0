"""The layout of ECMWF anemoi-datasets: zarr with all variables in ``data[time, variable, ensemble, cell]``.

The attributes name the variables, the shape of the grid before it was flattened, and dates that are missing.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from sfno_dist.data.calendars import decode_times, instants
from sfno_dist.data.contents import Contents, StoredField
from sfno_dist.data.errors import DataError


def is_anemoi(dataset: xr.Dataset) -> bool:
    data = dataset.variables.get("data")
    return data is not None and data.ndim == 4 and "variables" in dataset.attrs and "dates" in dataset.variables


def read_contents(dataset: xr.Dataset, path: str) -> Contents:
    """``DataError`` for a reduced grid, whose cells are no latitudes x longitudes."""
    data = dataset["data"]
    time_dim, variable_dim, member_dim, cell_dim = map(str, data.dims)
    names = [str(name) for name in dataset.attrs["variables"]]
    if len(set(names)) != data.sizes[variable_dim] or len(names) != len(set(names)):
        raise DataError(
            f"{path}: its attributes name {len(names)} variables, {len(set(names))} of them different, data has "
            f"{data.sizes[variable_dim]}; make the dataset anew"
        )
    about = dataset.attrs.get("variables_metadata", {})
    latitudes, longitudes, by_column = _points(dataset, path)
    times = decode_times(dataset["dates"].values, dataset["dates"].attrs, f"{path}: dates")
    missing = np.array([str(x) for x in dataset.attrs.get("missing_dates", [])], dtype="datetime64[ns]")
    gaps = np.flatnonzero(np.isin(instants(times), instants(missing)))
    count = data.sizes[member_dim]
    fields = {
        name: StoredField(
            array="data",
            dims=(time_dim, variable_dim, member_dim, cell_dim),
            sizes=tuple(data.shape),
            dtype=str(data.dtype),
            attributes={"units": about[name]["units"]} if "units" in about.get(name, {}) else {},
            fixed=((variable_dim, place),),
            member_dim=member_dim if count > 1 else None,
            members=tuple(range(count)) if count > 1 else (),
        )
        for place, name in enumerate(names)
    }
    return Contents(
        latitudes=latitudes,
        longitudes=longitudes,
        times=times,
        time_indices=np.arange(times.size),
        dims={"lat": cell_dim, "lon": cell_dim, "time": time_dim},
        fields=fields,
        cell_dim=cell_dim,
        cells_by_column=by_column,
        absent={"": gaps} if gaps.size else {},
    )


def _points(dataset: xr.Dataset, path: str) -> tuple[np.ndarray, np.ndarray, bool]:
    """(latitudes [n], longitudes [m], whether latitude varies fastest) of the flattened grid."""
    lat, lon = (dataset[name].values.astype(np.float64) for name in ("latitudes", "longitudes"))
    shape = tuple(dataset.attrs.get("field_shape", ()))
    # Without a shape it is told by the number of cells until the latitude, or the longitude, changes.
    runs = [int(np.flatnonzero(np.append(np.diff(x) != 0, True))[0]) + 1 for x in (lat, lon)]
    shapes = [(lat.size // run, run) for run in runs if run > 1]
    for first, second in ([shape] if len(shape) == 2 else []) + shapes:
        if first * second != lat.size:
            continue
        a, b = lat.reshape(first, second), lon.reshape(first, second)
        if np.ptp(a, axis=1).max() < 1e-4 and np.ptp(b, axis=0).max() < 1e-4:
            return a[:, 0], b[0], False
        if np.ptp(a, axis=0).max() < 1e-4 and np.ptp(b, axis=1).max() < 1e-4:
            return a[0], b[:, 0], True
    raise DataError(
        f"{path}: its {lat.size} cells are no latitudes x longitudes (a reduced or limited-area grid, or one thinned "
        f"by anemoi); make the dataset on a regular grid"
    )
