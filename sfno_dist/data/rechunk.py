"""``sfno-dist rechunk``: a zarr in canonical form from which each process of a mesh reads just its tile."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xarray as xr
from tqdm import tqdm

from sfno_dist.data.layout import tile_chunks
from sfno_dist.data.errors import DataError
from sfno_dist.data.ledger import LEDGER
from sfno_dist.data.open import open_dataset
from sfno_dist.geometry import Grid
from sfno_dist.mesh import Decomposition, ProcessMesh

# Fields held in memory at once: so many times of one variable as fit, so that a chunk of many times is decoded once.
MEMORY_BYTES = 256 * 2**20


def rechunk(
    paths: str | Sequence[str],
    output: str | os.PathLike,
    mesh: ProcessMesh,
    *,
    variables: str | Sequence[str] | None = None,
    progress: bool = True,
) -> tuple[int, int]:
    """Writes what ``open_dataset(paths, variables)`` reads, bit for bit, in chunks of one time x one tile of ``mesh``.

    The zarr (format 3, without consolidated metadata, which the format does not have) is made beside ``output``
    under a hidden name and renamed once it is whole; an interrupted run removes what it made and starts anew when it
    is called again. Packing and other encodings of the files are dropped. Memory: 256 MiB and one chunk of the files.

    Returns rows and columns of a chunk, see ``tile_chunks``. Raises ``DataError`` for what cannot be read and where
    ``output`` exists.
    """
    import zarr

    if int(zarr.__version__.split(".")[0]) < 3:
        raise DataError(f"rechunk writes zarr format 3, for which zarr {zarr.__version__} is too old; pip install zarr>=3")
    target = Path(output)
    if target.exists() or target.is_symlink():
        raise DataError(f"{target}: exists already; name another output or remove it first")
    if not target.absolute().parent.is_dir():
        raise DataError(f"{target}: the folder {target.absolute().parent} does not exist; make it first")
    dataset = open_dataset(paths, variables)
    tiles = Decomposition(Grid.from_coordinates(dataset.lat.values, dataset.lon.values), mesh)
    chunks = tile_chunks(tiles.row_bounds, tiles.column_bounds)
    with _whole_or_nothing(target) as partial:
        _write(dataset, partial, chunks, progress)
    return chunks


def _write(dataset: xr.Dataset, folder: Path, chunks: tuple[int, int], progress: bool) -> None:
    import zarr
    from zarr.codecs import BloscCodec

    # A chunk that gets lost later reads as NaN, which is refused, not as the zeros of an ordinary fill value.
    how = {"dtype": "float32", "fill_value": float("nan"), "config": {"write_empty_chunks": True}}
    dataset.coords.to_dataset().assign_attrs(dataset.attrs).to_zarr(folder, mode="w-", zarr_format=3, consolidated=False)
    group = zarr.open_group(folder, mode="r+", zarr_format=3)
    shape = tuple(dataset.sizes[dim] for dim in ("time", "lat", "lon"))
    with tqdm(total=4 * len(dataset) * int(np.prod(shape)), unit="B", unit_scale=True, disable=not progress) as bar:
        for name, field in dataset.data_vars.items():
            array = group.create_array(
                str(name),
                shape=shape,
                chunks=(1, *chunks),
                compressors=BloscCodec(typesize=4, cname="lz4", clevel=5, shuffle="shuffle"),
                dimension_names=("time", "lat", "lon"),
                attributes=dict(field.attrs),
                **how,
            )
            bar.set_description(str(name))
            for times in _blocks(field):
                array[times] = field[times].values
                bar.update(4 * (times.stop - times.start) * shape[1] * shape[2])


def _blocks(field: xr.DataArray) -> Iterator[slice]:
    """Runs of times to read at once: as many as a chunk of the files holds, as far as memory allows."""
    count, size = field.sizes["time"], 4 * field.sizes["lat"] * field.sizes["lon"]
    length = max(1, min(MEMORY_BYTES // size, 64))
    for start in range(0, count, length):
        yield slice(start, min(start + length, count))


@contextmanager
def _whole_or_nothing(target: Path) -> Iterator[Path]:
    """A hidden folder beside ``target`` that takes its name at the end, or vanishes with an error or interrupt."""
    partial = target.absolute().parent / f".{target.name}.{os.getpid()}.partial"
    try:
        yield partial
        if target.exists():
            raise DataError(f"{target}: was made by someone else meanwhile; name another output")
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
