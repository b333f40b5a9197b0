"""The read ledger against counting by hand, and against what zarr and HDF5 fetched."""

import itertools
import math
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from torch.utils.data import DataLoader, Dataset

from sfno_dist import Grid
from sfno_dist.data import open_dataset
from sfno_dist.data.layout import StoredLayout, tile_chunks
from sfno_dist.data.ledger import LEDGER
from sfno_dist.mesh.decomposition import even_bounds

GRID = Grid("equiangular", 37, 72)
TIMES = np.datetime64("2020-01-01", "ns") + np.arange(8) * np.timedelta64(6, "h")
TILES = ((slice(0, 18), slice(0, 36)), (slice(18, 37), slice(36, 72)), (slice(5, 6), slice(0, 72)))


@pytest.fixture(autouse=True)
def _empty() -> None:
    LEDGER.clear()


def noise(grid: Grid = GRID) -> xr.Dataset:
    values = np.random.default_rng(0).standard_normal((len(TIMES), *grid.shape)).astype(np.float32)
    coordinates = {"time": TIMES, "latitude": grid.latitudes_degrees, "longitude": grid.longitudes_degrees}
    return xr.Dataset({"a": (("time", "latitude", "longitude"), values)}, coordinates)


def chunk_bytes_by_hand(layout: StoredLayout, places: list) -> int:
    """Every element's chunk, collected in a set; of a compressed chunk what lies within the array."""
    hit = {tuple(i // c for i, c in zip(at, layout.chunks, strict=True)) for at in itertools.product(*places)}
    total = 0
    for chunk in hit:
        ends = [(i + 1) * c for i, c in zip(chunk, layout.chunks, strict=True)]
        if layout.compressed:
            ends = list(map(min, ends, layout.shape))
        total += math.prod(end - i * c for end, i, c in zip(ends, chunk, layout.chunks, strict=True))
    return layout.itemsize * total


@pytest.mark.parametrize("seed", range(40))
def test_bytes_of_chunks_are_those_of_every_element(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = tuple(random.integers(1, 12, random.integers(1, 5)))
    chunks = tuple(int(random.integers(1, n + 2)) for n in shape)
    layout = StoredLayout(tuple("tlyx"[: len(shape)]), shape, int(random.choice([2, 4])), chunks, None, seed % 2 == 0)
    index, places = [], []
    for n in shape:
        start, stop = sorted(random.integers(0, n + 1, 2))
        kind = random.integers(3)
        part = (int(random.integers(n)), slice(start, stop), random.permutation(n)[: n // 2 + 1])[kind]
        index.append(part)
        places.append(list(np.atleast_1d(np.arange(n)[part])))
    assert layout.touched(index) == chunk_bytes_by_hand(layout, places)
    assert layout.asked(index) == layout.itemsize * math.prod(map(len, places))


class CountingStore(zarr.storage.WrapperStore):
    """What is fetched of chunks, in bytes."""

    fetched = 0

    async def get(self, key, prototype, byte_range=None):
        found = await super().get(key, prototype, byte_range)
        if "zarr.json" not in key and "/.z" not in key:
            CountingStore.fetched += len(found) if found is not None else 0
        return found


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("chunks", "shards"), [((1, 18, 36), None), ((4, 10, 7), None), ((1, 9, 36), (2, 36, 72))])
def test_zarr_fetches_what_the_ledger_says(tmp_path: Path, zarr_format: int, compressed: bool, chunks, shards) -> None:
    if shards and zarr_format == 2:
        pytest.skip("format 2 has no shards")
    encoding = {"chunks": chunks, "compressors": "auto" if compressed else None}
    noise().to_zarr(
        tmp_path / "a.zarr",
        zarr_format=zarr_format,
        consolidated=False,
        encoding={"a": encoding | ({"shards": shards} if shards else {})},
    )
    data = open_dataset(tmp_path / "a.zarr")
    array = zarr.open_group(CountingStore(zarr.storage.LocalStore(tmp_path / "a.zarr")), mode="r")["a"]
    for rows, columns in TILES:
        LEDGER.clear()
        CountingStore.fetched = 0
        expected = array[3, rows, columns]
        np.testing.assert_array_equal(data.a[3, rows, columns].values, expected)
        # Noise compresses to 0.9 of its size or so; a shard's index, 16 bytes for a chunk, is read for each read.
        index = 0 if not shards else 16 * math.prod(s // c for s, c in zip(shards, chunks, strict=True)) + 4
        touched = LEDGER.total.touched
        assert LEDGER.total.asked == expected.nbytes
        if compressed:
            assert 0.8 * touched < CountingStore.fetched < 1.3 * touched + 4 * index + 64
        else:
            assert 0 <= CountingStore.fetched - touched <= 4 * index


def read_characters() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux to count what a process reads")
@pytest.mark.parametrize("chunks", [None, (1, 181, 360), (1, 90, 180)])
@pytest.mark.parametrize("compressed", [False, True])
def test_hdf5_reads_what_the_ledger_says(tmp_path: Path, chunks, compressed: bool) -> None:
    if compressed and chunks is None:
        pytest.skip("what lies in one piece is not compressed")
    data = noise(Grid("equiangular", 181, 360))
    how = {"contiguous": True} if chunks is None else {"chunksizes": chunks, "zlib": compressed, "complevel": 1}
    data.to_netcdf(tmp_path / "a.nc", encoding={"a": how})
    opened = open_dataset(tmp_path / "a.nc")
    tiles = ((slice(0, 90), slice(0, 180)), (slice(90, 181), slice(180, 360)), (slice(0, 181), slice(0, 10)))
    for time, (rows, columns) in enumerate(tiles):
        opened.a[7, rows, columns].values  # noqa: B018 (the file's own tables are read once)
        LEDGER.clear()
        before = read_characters()
        opened.a[time, rows, columns].values  # noqa: B018
        fetched = read_characters() - before
        # Noise deflates to 0.9 or so.
        assert (0.8 if compressed else 0.99) * LEDGER.total.touched < fetched < 1.02 * LEDGER.total.touched + 4096


def test_a_chunk_of_the_whole_series_is_read_256_times_over(tmp_path: Path) -> None:
    grid = Grid("equiangular", 19, 36)
    data = noise(grid).isel(time=np.arange(64) % 8)
    data["time"] = TIMES[0] + np.arange(64) * np.timedelta64(6, "h")
    data.to_zarr(tmp_path / "a.zarr", consolidated=False, encoding={"a": {"chunks": (64, 19, 36)}})
    opened = open_dataset(tmp_path / "a.zarr")
    for rows, columns in itertools.product((slice(0, 9), slice(9, 19)), (slice(0, 18), slice(18, 36))):
        opened.a[5, rows, columns].values  # noqa: B018
    assert LEDGER.total.amplification == 256


def test_a_file_written_anew_is_counted_by_its_new_layout(tmp_path: Path) -> None:
    for chunks in ((1, 37, 72), (4, 37, 72)):
        noise().to_netcdf(tmp_path / "a.nc", encoding={"a": {"chunksizes": chunks}})
        open_dataset(tmp_path / "a.nc").a[0].values  # noqa: B018
    assert LEDGER.total.touched == (1 + 4) * 4 * 37 * 72


def test_planned_reads_equal_real_ones_and_are_not_counted(tmp_path: Path) -> None:
    noise().to_netcdf(tmp_path / "a.nc", encoding={"a": {"chunksizes": (2, 10, 20)}})
    field = open_dataset(tmp_path / "a.nc").a
    with LEDGER.without_reading() as planned:
        assert not field[3, 5:30, 0:30].values.any()
    assert LEDGER.total.reads == 0
    assert field[3, 5:30, 0:30].values.any()
    assert planned == LEDGER.entries


class Fields(Dataset):
    def __init__(self, path: Path) -> None:
        self.field = open_dataset(path).a

    def __len__(self) -> int:
        return len(TIMES)

    def __getitem__(self, item: int) -> torch.Tensor:
        return torch.from_numpy(self.field[item, 0:18, 0:36].values)


@pytest.mark.parametrize(("start", "workers", "epochs"), [("fork", 2, 2), ("spawn", 1, 1)])
def test_workers_counts_come_back(tmp_path: Path, start: str, workers: int, epochs: int) -> None:
    noise().to_netcdf(tmp_path / "a.nc", encoding={"a": {"chunksizes": (1, 37, 72)}})
    fields = Fields(tmp_path / "a.nc")
    for item in range(len(fields)):
        fields[item]
    serial = LEDGER.total
    LEDGER.clear()
    loader = DataLoader(
        fields,
        num_workers=workers,
        worker_init_fn=LEDGER.of_workers(workers),
        multiprocessing_context=multiprocessing.get_context(start),
    )
    for _ in range(epochs):
        list(loader)
    assert not LEDGER.entries
    total = LEDGER.total
    assert (total.asked, total.touched) == (epochs * serial.asked, epochs * serial.touched)
    assert total.reads == epochs * len(TIMES)


@pytest.mark.parametrize(
    ("shape", "polar", "azimuth"),
    [
        ((19, 36), 2, 2),
        ((19, 36), 4, 4),
        ((73, 144), 2, 4),
        ((181, 360), 2, 4),
        ((181, 360), 4, 1),
        ((721, 1440), 8, 4),
    ],
)
def test_chunks_fit_uneven_tiles(shape: tuple[int, int], polar: int, azimuth: int) -> None:
    bounds = even_bounds(shape[0], polar), even_bounds(shape[1], azimuth)
    layout = StoredLayout(("y", "x"), shape, 4, tile_chunks(*bounds), compressed=True)
    for rows, columns in itertools.product(*map(itertools.pairwise, bounds)):
        tile = (slice(*rows), slice(*columns))
        assert layout.touched(tile) <= 1.05 * layout.asked(tile)


def test_chunks_stay_few_where_none_fit() -> None:
    """181 rows in 8 tiles of 22 or 23: chunks of one row would fit, 23 for each tile and variable."""
    bounds = even_bounds(181, 8)
    rows, columns = tile_chunks(bounds, (0, 360))
    layout = StoredLayout(("y", "x"), (181, 360), 4, (rows, columns), compressed=True)
    factors = [
        layout.touched(t) / layout.asked(t)
        for a, b in itertools.pairwise(bounds)
        for t in [(slice(a, b), slice(0, 360))]
    ]
    assert max(factors) < 1.1 and all((b - 1) // rows - a // rows < 16 for a, b in itertools.pairwise(bounds))
