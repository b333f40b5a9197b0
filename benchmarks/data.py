"""Reading tiles: chunks touched, samples a second, memory, and how long a training step waits.

    python benchmarks/data.py [--times 72] [--folder F]

Makes 20 variables on a 1 degree grid (181 x 360) from the demo's flow, in four stores of some 0.35 GB each, in a
temporary folder. A sample is one time of all 20 variables, as float32. All files are in the page cache, so what is
timed is the way from there. Readers take turns and medians count, so that other jobs on the machine weigh on all alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import netCDF4
import numpy as np
import torch
import xarray as xr
from torch.utils.data import DataLoader, Dataset

from sfno_dist import Decomposition, Grid, ProcessMesh
from sfno_dist.data.demo import DemoWeather
from sfno_dist.data.inspect import tile_reads
from sfno_dist.data.open import dataset_of, open_sources
from sfno_dist.data.rechunk import rechunk
from sfno_dist.data.samples import FieldReader

Reader = Callable[[int], object]
GRID = Grid("equiangular", 181, 360)
VARIABLES = [f"x{number}" for number in range(20)]
LAYOUTS = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (2, 4))
GLOBE_NC, SERIES_NC, GLOBE_ZARR, TILES_ZARR = "globe.nc", "series.nc", "globe.zarr", "tiles_2x2.zarr"
ROUNDS = 5


def make(folder: Path, times: int) -> None:
    """Stores of the same values: a chunk is one globe, 16 times of a globe, or one tile of 2 x 2."""
    weather, noise = DemoWeather(GRID), np.random.default_rng(0)
    fields = np.empty((20, times, *GRID.shape), np.float32)
    for index in range(times):
        now = list(weather.fields().values())
        for number in range(20):
            # variables of their own, with the noise in the last digits that observed fields have
            mixed = now[number % 4] * (1 + 0.1 * number) + 0.05 * now[number % 4].std() * now[(number + 1) % 4]
            fields[number, index] = mixed * (1 + 1e-4 * noise.standard_normal(GRID.shape, np.float32))
        weather.advance(6)
    dims = ("time", "latitude", "longitude")
    coordinates = {
        "time": np.datetime64("2000-01-01", "ns") + np.arange(times) * np.timedelta64(6, "h"),
        "latitude": ("latitude", GRID.latitudes_degrees, {"units": "degrees_north"}),
        "longitude": ("longitude", GRID.longitudes_degrees, {"units": "degrees_east"}),
    }
    data = xr.Dataset({name: (dims, fields[n]) for n, name in enumerate(VARIABLES)}, coordinates)
    for name, length in ((GLOBE_NC, 1), (SERIES_NC, 16)):
        data.to_netcdf(folder / name, encoding={x: {"chunksizes": (length, *GRID.shape)} for x in VARIABLES})
    chunks = {x: {"chunks": (1, *GRID.shape)} for x in VARIABLES}
    data.to_zarr(folder / GLOBE_ZARR, zarr_format=3, consolidated=False, encoding=chunks)
    rechunk([str(folder / GLOBE_NC)], folder / TILES_ZARR, ProcessMesh.on_paper(polar=2, azimuth=2))


def reader_of(path: Path, layout: tuple[int, int] = (1, 1), place: int = 0) -> FieldReader:
    """What a training reads with, of one tile, with the files open."""
    mesh = ProcessMesh.on_paper(polar=layout[0], azimuth=layout[1], rank=place)
    reader = FieldReader(str(path), VARIABLES, mesh=mesh)
    reader(0)
    return reader


def plain_xarray(path: Path) -> Reader:
    how = {} if path.suffix == ".nc" else {"engine": "zarr", "consolidated": False}
    dataset = xr.open_dataset(path, chunks=None, **how)
    return lambda index: dataset.isel(time=index).load()


def plain_netcdf(path: Path, rows: slice, columns: slice, *, decoded: bool = True) -> Reader:
    """``decoded``: with masks, scale and offset, as netCDF4 reads when nobody tells it otherwise."""
    file = netCDF4.Dataset(path)
    file.set_auto_maskandscale(decoded)
    return lambda index: np.stack([file[name][index, rows, columns] for name in VARIABLES])


def order_of(times: int) -> list[int]:
    """The same in all rounds: with more times than HDF5 caches, no reader finds a chunk there from the round before."""
    return np.random.default_rng(0).permutation(times).tolist()


def paired(readers: dict[str, Reader], times: int) -> dict[str, tuple[float, float, float]]:
    """(seconds by the clock, of the CPU, its ratio to the first reader's) of a sample: medians.

    The readers take turns at each time, so that what else the machine does falls on all alike.
    """
    taken = []
    for _ in range(ROUNDS):
        for index in order_of(times):
            for one in readers.values():
                start, start_cpu = time.perf_counter(), time.process_time()
                one(index)
                taken.append((time.perf_counter() - start, time.process_time() - start_cpu))
    seconds = np.array(taken).reshape(-1, len(readers), 2)
    ratios = np.median(seconds[:, :, 1] / seconds[:, :1, 1], axis=0)
    clock, cpu = np.median(seconds, axis=0).T
    return {name: (clock[n], cpu[n], ratios[n]) for n, name in enumerate(readers)}


def print_chunks(folder: Path) -> None:
    print("| store | polar x azimuth | needed KiB | touched / needed | worst process |\n|---|---|---|---|---|")
    for name in (GLOBE_NC, SERIES_NC, GLOBE_ZARR, TILES_ZARR):
        opened = dataset_of(open_sources(folder / name))
        for polar, azimuth in LAYOUTS:
            reads = tile_reads(*opened, ProcessMesh.on_paper(polar=polar, azimuth=azimuth))
            needed, touched = (sum(getattr(tile, what) for tile in reads) for what in ("needed", "touched"))
            worst = max(tile.touched / tile.needed for tile in reads)
            cells = f"{needed / len(reads) / 1024:.0f} | {touched / needed:.2f} | {worst:.2f}"
            print(f"| {name} | {polar} x {azimuth} | {cells} |")


def _tile_process(path: Path, layout: tuple[int, int], place: int, times: int, barrier, results) -> None:
    torch.set_num_threads(1)
    reader, cpus = reader_of(path, layout, place), []
    for _ in range(ROUNDS):
        barrier.wait()
        start = time.process_time()
        for index in order_of(times):  # all processes of a replica read the same times
            reader(index)
        cpus.append((time.process_time() - start) / times)
        barrier.wait()
    results.put(float(np.median(cpus)))


def together(path: Path, layout: tuple[int, int], alone: Reader, times: int) -> tuple[float, float, float]:
    """(seconds by the clock for a sample of all tiles, of the CPU of the slowest process, clock against ``alone``).

    A round of all processes, each its tile, and one of ``alone`` in this process take turns.
    """
    context = multiprocessing.get_context("spawn")
    count = layout[0] * layout[1]
    barrier, results = context.Barrier(count + 1), context.Queue()
    arguments = [(path, layout, place, times, barrier, results) for place in range(count)]
    processes = [context.Process(target=_tile_process, args=each) for each in arguments]
    for process in processes:
        process.start()
    clocks, ratios = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for index in order_of(times):
            alone(index)
        single = time.perf_counter() - start
        barrier.wait()
        start = time.perf_counter()
        barrier.wait()
        clocks.append((time.perf_counter() - start) / times)
        ratios.append(clocks[-1] * times / single)
    cpu = max(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    return float(np.median(clocks)), cpu, float(np.median(ratios))


def print_speed(folder: Path, times: int) -> None:
    """Of each sample, against plain xarray; tiles together also against it in the store of whole globes."""
    print(f"\nload average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
    print("| store | reader | processes | samples/s | CPU ms of a process | CPU / xarray |\n|---|---|---|---|---|---|")

    def line(name: str, reader: str, processes: int, figures: tuple[float, float, float]) -> None:
        clock, cpu, ratio = figures
        print(f"| {name} | {reader} | {processes} | {1 / clock:.0f} | {1e3 * cpu:.1f} | {ratio:.2f} |", flush=True)

    quarter = Decomposition(GRID, ProcessMesh.on_paper(polar=2, azimuth=2)).tile(3)
    for name in (GLOBE_NC, GLOBE_ZARR, TILES_ZARR):
        readers = {
            "plain xarray, globe": plain_xarray(folder / name),
            "tile reader, globe": reader_of(folder / name),
            "tile reader, a quarter": reader_of(folder / name, (2, 2), 3),
        }
        if name == GLOBE_NC:
            for what, part in (("globe", (slice(None), slice(None))), ("a quarter", quarter)):
                readers[f"plain netCDF4 slicing, {what}"] = plain_netcdf(folder / name, *part)
                readers[f"netCDF4, neither masked nor scaled, {what}"] = plain_netcdf(
                    folder / name, *part, decoded=False
                )
        for reader, figures in paired(readers, times).items():
            line(name, reader, 1, figures)
    print(
        "\n| tiles of 2 x 2 from | plain xarray's globe from | samples/s of 4 | CPU ms of one | clock of 4 / xarray |"
    )
    print("|---|---|---|---|---|")
    for tiles, globe in ((GLOBE_NC, GLOBE_NC), (TILES_ZARR, TILES_ZARR), (TILES_ZARR, GLOBE_ZARR)):
        clock, cpu, ratio = together(folder / tiles, (2, 2), plain_xarray(folder / globe), times)
        print(f"| {tiles} | {globe} | {1 / clock:.0f} | {1e3 * cpu:.1f} | {ratio:.2f} |", flush=True)


def print_memory(folder: Path) -> None:
    """Peak of what Python and numpy hold while 8 times are read and kept."""
    print("\n| store | polar x azimuth | share of the globe | peak MiB for 8 times |\n|---|---|---|---|")
    for name in (GLOBE_NC, TILES_ZARR):
        for layout in ((1, 1), (1, 2), (2, 2), (2, 4)):
            reader = reader_of(folder / name, layout)
            tracemalloc.start()
            kept = [reader(index) for index in range(8)]
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            share = kept[0][0].size / (GRID.nlat * GRID.nlon)
            print(f"| {name} | {layout[0]} x {layout[1]} | {share:.3f} | {peak / 2**20:.1f} |")


class Samples(Dataset):
    def __init__(self, path: Path, times: int) -> None:
        self.reader, self.times = reader_of(path, (2, 2), 3), times

    def __len__(self) -> int:
        return self.times

    def __getitem__(self, item: int) -> torch.Tensor:
        return torch.from_numpy(self.reader(item))


def epoch(samples: Samples, step: float) -> tuple[float, float]:
    """(share of the time that steps of ``step`` seconds wait for a worker that reads ahead, seconds of a batch).

    After the first step, in which the worker starts.
    """
    loader = DataLoader(samples, batch_size=1, num_workers=1, prefetch_factor=4, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    waited, began = 0.0, time.perf_counter()
    for _ in range(1, len(samples)):
        start = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - start
        time.sleep(step)  # as a GPU computes, without the CPU
    total = time.perf_counter() - began
    return waited / total, total / (len(samples) - 1)


def print_wait(folder: Path, times: int) -> None:
    """Steps that compute for some multiple of what a worker takes to read a batch and hand it over, and for 50 ms."""
    print(f"\nload average {os.getloadavg()[0]:.1f}")
    print("| store | ms to read and hand over | step | waited, median of rounds |\n|---|---|---|---|")
    steps = {"1.2 of that": 1.2, "2 of that": 2.0, "50 ms": None}
    for name in (GLOBE_NC, TILES_ZARR):
        samples = Samples(folder / name, times)
        readings, waited = [], {step: [] for step in steps}
        for _ in range(ROUNDS):
            for step, factor in steps.items():
                readings.append(epoch(samples, 0.0)[1])  # of the machine as it is now
                waited[step].append(epoch(samples, factor * readings[-1] if factor else 0.05)[0])
        for step, shares in waited.items():
            took, share = 1e3 * np.median(readings), 100 * np.median(shares)
            print(f"| {name} | {took:.1f} | {step} | {share:.1f} % |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=72)
    parser.add_argument("--folder", help="where to make the stores, or find those of an earlier run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        os.makedirs(folder, exist_ok=True)
        if not (folder / TILES_ZARR).exists():
            make(folder, arguments.times)
        print_chunks(folder)
        print_speed(folder, arguments.times)
        print_memory(folder)
        print_wait(folder, arguments.times)


if __name__ == "__main__":
    main()
