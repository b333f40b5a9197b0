"""``sfno-dist rechunk``: a zarr in canonical form from which each process of a mesh reads just its tile."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
import zarr.codecs
from tqdm import tqdm

from sfno_dist.data.errors import DataError
from sfno_dist.data.layout import tile_chunks
from sfno_dist.data.open import dataset_of, open_sources
from sfno_dist.data.output import check_output, whole_or_nothing
from sfno_dist.data.source import SourceFile
from sfno_dist.geometry import Grid
from sfno_dist.mesh import Decomposition, ProcessMesh

MEMORY_BYTES = 128 * 2**20  # of one variable, read at once


def rechunk(
    paths: str | Sequence[str],
    output: str | os.PathLike,
    mesh: ProcessMesh,
    *,
    variables: Sequence[str] | None = None,
    missing: Sequence[str] = (),
    member: int | None = None,
    progress: bool = False,
) -> tuple[int, int]:
    """Writes what ``open_dataset`` reads, bit for bit, in chunks of one time x one tile of ``mesh``.

    The zarr (format 3, without consolidated metadata, which the format does not have) is made beside ``output``
    under a hidden name and renamed once it is whole; an interrupted run removes what it made, and the next one starts
    anew. Packing and other encodings of the files are dropped, and times that they declare missing. Memory: some
    times 128 MiB, and one chunk of the files.

    ``variables`` are, when none are named, all fields, those on pressure levels once for each level (``z500``).

    Returns rows and columns of a chunk, see ``tile_chunks``. Raises ``DataError`` for what cannot be read and where
    ``output`` exists.
    """
    target = Path(output)
    check_output(target)
    if target.suffix != ".zarr":
        raise DataError(f"{output}: rechunk writes a zarr folder; give it a name that ends in .zarr")
    sources = open_sources(paths, member=member)
    dataset, _ = dataset_of(sources, list(variables or every_field(sources)), missing=missing)
    dataset = dataset.isel(time=np.flatnonzero(dataset["complete"].values)).drop_vars("complete")
    tiles = Decomposition(Grid.from_coordinates(dataset.lat.values, dataset.lon.values), mesh)
    chunks = tile_chunks(tiles.row_bounds, tiles.column_bounds)
    with whole_or_nothing(target) as partial:
        _write(dataset, partial, chunks, progress)
    return chunks


def every_field(sources: Sequence[SourceFile]) -> list[str]:
    """Fields on (time, lat, lon), and those on pressure levels once for each level, such as ``z500``."""
    names: dict[str, None] = {}
    for source in sources:
        flat = set(source.field_names())
        for name, field in source.fields.items():
            if name in flat:
                names[name] = None
            elif field.level_dim and source.dims["time"] in (None, *field.dims):
                names.update(dict.fromkeys(f"{name}{level:g}" for level in field.levels if level % 1 == 0))
                if left_out := [f"{level:g}" for level in field.levels if level % 1]:
                    told = f"{name} at {', '.join(left_out)} hPa is left out: names of fields take whole hPa"
                    warnings.warn(f"{source.path}: {told}", stacklevel=2)
    if not names:
        source = sources[0]
        raise DataError(f"{source.path}: no variable on (time, lat, lon); it holds {', '.join(source.fields)}")
    return list(names)


def _write(dataset: xr.Dataset, folder: Path, chunks: tuple[int, int], progress: bool) -> None:
    coordinates = dataset.coords.to_dataset().assign_attrs(dataset.attrs)
    coordinates.to_zarr(folder, mode="w-", zarr_format=3, consolidated=False)
    group = zarr.open_group(folder, mode="r+", zarr_format=3)
    count, *shape = (dataset.sizes[dim] for dim in ("time", "lat", "lon"))
    field_bytes = 4 * int(np.prod(shape))
    length = max(1, MEMORY_BYTES // field_bytes)  # times read at once, so that a chunk of many is decoded once
    total = len(dataset.data_vars) * count * field_bytes
    with tqdm(total=total, unit="B", unit_scale=True, disable=not progress) as bar:
        for name, field in dataset.data_vars.items():
            bar.set_description(str(name))
            array = create_field(
                group,
                str(name),
                (count, *shape),
                chunks=(1, *chunks),
                dims=("time", "lat", "lon"),
                attributes=field.attrs,
            )
            for start in range(0, count, length):
                block = field[start : start + length].values
                array[start : start + length] = block
                bar.update(block.nbytes)


def create_field(
    group: zarr.Group,
    name: str,
    shape: tuple[int, ...],
    *,
    chunks: tuple[int, ...],
    dims: tuple[str, ...],
    attributes: Mapping[str, Any],
) -> zarr.Array:
    """A float32 array of zarr format 3, compressed, in which every chunk is to be written."""
    return group.create_array(
        name,
        shape=shape,
        dtype="float32",
        chunks=chunks,
        compressors=zarr.codecs.BloscCodec(typesize=4, cname="lz4", clevel=5, shuffle="shuffle"),
        # A chunk that is lost later reads as NaN, which is refused; the fill value is 0 otherwise.
        fill_value=float("nan"),
        config={"write_empty_chunks": True},
        dimension_names=dims,
        attributes={key: _plain(value) for key, value in attributes.items()},
    )


def _plain(value: Any) -> Any:
    """An attribute as JSON takes it."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
