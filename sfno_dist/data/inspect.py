"""``sfno-dist inspect``: what files hold, and what each process of a mesh reads of their chunks."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from sfno_dist.data.calendars import time_text
from sfno_dist.data.checks import files
from sfno_dist.data.errors import DataError
from sfno_dist.data.fields import Fields
from sfno_dist.data.ledger import LEDGER, Reads
from sfno_dist.data.open import dataset_of, open_sources
from sfno_dist.data.rechunk import every_field
from sfno_dist.data.source import SourceFile
from sfno_dist.data.timeline import TimeStep
from sfno_dist.geometry import Grid
from sfno_dist.mesh import Decomposition, ProcessMesh

USUAL_LAYOUTS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (2, 4), (4, 4))
WORTH_MENDING = 1.5


@dataclass(frozen=True)
class TileReads:
    """What one process reads of all variables at one time; bytes as stored, uncompressed."""

    rows: slice
    columns: slice
    needed: int
    touched: int


def tile_reads(dataset: xr.Dataset, fields: Fields, mesh: ProcessMesh) -> list[TileReads]:
    """Of each process of a globe of ``mesh``, counted without reading a field of what ``dataset_of`` gives."""
    tiles = Decomposition(Grid.from_coordinates(dataset.lat.values, dataset.lon.values), mesh)
    names = {name: fields.stored_type(name).itemsize for name in map(str, dataset.data_vars)}
    found = []
    for place in range(mesh.globe_size):
        rows, columns = tiles.tile(place)
        planned = _planned(dataset, fields, list(names), rows=rows, columns=columns)
        needed = (rows.stop - rows.start) * (columns.stop - columns.start) * sum(names.values())
        touched = sum(entry.touched for entry in planned.values())
        found.append(TileReads(rows, columns, needed, touched))
    return found


def _planned(
    dataset: xr.Dataset, fields: Fields, names: list[str], *, rows: slice, columns: slice
) -> dict[tuple[str, str], Reads]:
    """What a tile of one time in the middle takes of each array, all variables together, without reading it."""
    whole = np.flatnonzero(dataset["complete"].values)
    points = (np.arange(part.start, part.stop) for part in (rows, columns))
    with LEDGER.without_reading() as entries, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are not plausible: they are not the file's
        fields.read(names, whole[[len(whole) // 2]], *points)
    return entries


def amplification(reads: Sequence[TileReads]) -> float:
    """Bytes of chunks touched per byte needed, all processes together."""
    return sum(tile.touched for tile in reads) / sum(tile.needed for tile in reads)


def report(
    paths: Sequence[str],
    mesh: ProcessMesh,
    *,
    variables: Sequence[str] | None = None,
    missing: Sequence[str] = (),
    member: int | None = None,
) -> str:
    """Tables of grid, times, variables and reads as plain text; ``DataError`` for what ``open_dataset`` refuses."""
    sources = open_sources(paths, member=member)
    names = list(variables or every_field(sources))
    dataset, fields = dataset_of(sources, names, missing=missing)
    reads = tile_reads(dataset, fields, mesh)
    return "\n\n".join(
        (
            _overview(sources, dataset),
            "Variables\n" + _table(_variable_rows(dataset, fields, sources)),
            f"One time of all {len(names)} fields on {_layout_text(mesh)} processes (polar x azimuth), uncompressed\n"
            + _table(_process_rows(reads)),
            "Layouts, all processes together\n" + _table(_layout_rows(dataset, fields, mesh)),
            _advice(paths, mesh, reads, variables=variables, missing=missing, member=member),
        )
    )


def _overview(sources: list[SourceFile], dataset: xr.Dataset) -> str:
    grid = Grid.from_coordinates(dataset.lat.values, dataset.lon.values)
    lat, lon, times = dataset.lat.values, dataset.lon.values, dataset.time.values
    size = sum(_bytes_on_disk(source.path) for source in sources)
    lines = [
        ("files", f"{len(sources)}, {_bytes(size)} on disk"),
        ("grid", f"{grid}; lat {lat[0]:g} to {lat[-1]:g}, lon {lon[0]:g} to {lon[-1]:g} degrees"),
        ("times", f"{len(times)}, {time_text(times[0])} to {time_text(times[-1])}"),
    ]
    if len(times) > 1:
        lines += _gap_lines(times)
    lines.append(("repeated", str(_repeated(sources, str(next(iter(dataset.data_vars)))))))
    absent = int((~dataset["complete"].values).sum())
    if absent:
        lines.append(("missing", f"{absent} times that the files declare missing"))
    return "\n".join(f"{name:<9} {text}" for name, text in lines)


def _gap_lines(times: np.ndarray) -> list[tuple[str, str]]:
    try:
        step = TimeStep.of(times)
    except DataError as error:
        return [("step", str(error))]
    breaks = np.flatnonzero(np.diff(step.ordinals(times)) != step.stride)
    text = "none"
    if breaks.size:
        shown = [f"{time_text(times[i])} to {time_text(times[i + 1])}" for i in breaks[:3]]
        text = f"{breaks.size}: {', '.join(shown)}{', ...' if breaks.size > 3 else ''}"
    return [("step", str(step)), ("gaps", text)]


def _repeated(sources, name: str) -> int:
    """How many times of a variable come more than once in the files."""
    instants = []
    for source in sources:
        try:
            source.variable(name)
        except DataError:
            continue
        instants.append(source.instants)
    found = np.concatenate(instants)
    return found.size - np.unique(found).size


def _variable_rows(dataset: xr.Dataset, fields: Fields, sources) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("name", "units", "stored as", "dtype", "levels (hPa)", "dims", "chunks")]
    groups: dict[tuple[str, str], list[str]] = {}
    for name in map(str, dataset.data_vars):
        for source in sources:
            try:
                groups.setdefault((source.path, source.stored_name(name)[0]), []).append(name)
                break
            except DataError:
                continue
    by_path = {source.path: source for source in sources}
    for (path, stored), names in groups.items():
        field = by_path[path].fields[stored]
        planned = _planned(dataset, fields, names[:1], rows=slice(0, 1), columns=slice(0, 1))
        layout = next(iter(planned.values())).layout
        shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        levels = ", ".join(f"{level:g}" for level in field.levels) if len(field.levels) < 8 else f"{len(field.levels)}"
        dims = " x ".join(f"{dim} {size}" for dim, size in zip(field.dims, field.sizes, strict=True))
        units = str(field.attributes.get("units", "")) or "none"
        rows.append((shown, units, stored, field.dtype, levels or "-", dims, str(layout)))
    return rows


def _process_rows(reads: list[TileReads]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("process", "rows", "columns", "needed", "chunks touched", "factor")]
    for place, tile in enumerate(reads):
        row_text, column_text = (f"{part.start}:{part.stop}" for part in (tile.rows, tile.columns))
        factor = f"{tile.touched / tile.needed:.2f}"
        rows.append((str(place), row_text, column_text, _bytes(tile.needed), _bytes(tile.touched), factor))
    return rows


def _layout_rows(dataset: xr.Dataset, fields: Fields, mesh: ProcessMesh) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("polar x azimuth", "needed", "chunks touched", "factor", "busiest process")]
    nlat, nlon = dataset.sizes["lat"], dataset.sizes["lon"]
    for polar, azimuth in dict.fromkeys(((mesh.polar, mesh.azimuth), *USUAL_LAYOUTS)):
        if polar > nlat or azimuth > nlon:
            continue
        layout = ProcessMesh.on_paper(polar=polar, azimuth=azimuth, row_balance=mesh.row_balance)
        reads = tile_reads(dataset, fields, layout)
        needed, touched = (sum(getattr(tile, what) for tile in reads) for what in ("needed", "touched"))
        most = _bytes(max(tile.touched for tile in reads))
        rows.append((_layout_text(layout), _bytes(needed), _bytes(touched), f"{touched / needed:.2f}", most))
    return rows


def _advice(paths, mesh: ProcessMesh, reads, *, variables, missing, member) -> str:
    factor = amplification(reads)
    if factor <= WORTH_MENDING:
        return f"Chunks fit {_layout_text(mesh)} processes: {factor:.2f} bytes are read for one that is needed."
    first = Path(files(paths)[0])
    balance = f",row_balance={mesh.row_balance}" if mesh.row_balance != "count" else ""
    words = ["sfno-dist", "rechunk", *paths, f"{first.stem}_polar{mesh.polar}_azimuth{mesh.azimuth}.zarr"]
    words += ["--mesh", f"polar={mesh.polar},azimuth={mesh.azimuth}{balance}"]
    for option, values in (("--variables", variables), ("--missing", missing)):
        words += [option, *values] if values else []
    words += ["--member", str(member)] if member is not None else []
    return (
        f"Chunks do not fit {_layout_text(mesh)} processes: {factor:.4g} bytes are read for one that is needed. "
        f"This mends it:\n    {shlex.join(words)}"
    )


def _layout_text(mesh: ProcessMesh) -> str:
    return f"{mesh.polar} x {mesh.azimuth}"


def _bytes_on_disk(path: str) -> int:
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
