"""Reading tiles: chunks touched, samples a second, memory, and how long a training step waits.

    python benchmarks/data.py [--times 48] [--folder F]

Makes 20 variables on a 1 degree grid (181 x 360) from the demo's flow, in four stores of some 0.25 GB each, in a
temporary folder. A sample is one time of all 20 variables, as float32. All files are in the page cache after the first
round, so what is timed is the way from there; of some rounds the fastest counts.
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
from sfno_dist.data import open_dataset
from sfno_dist.data.demo import DemoWeather
from sfno_dist.data.inspect import tile_reads
from sfno_dist.data.rechunk import rechunk

GRID = Grid("equiangular", 181, 360)
VARIABLES = [f"x{number}" for number in range(20)]
LAYOUTS = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (2, 4))
GLOBE_NC, SERIES_NC, GLOBE_ZARR, TILES_ZARR = "globe.nc", "series.nc", "globe.zarr", "tiles_2x2.zarr"
ROUNDS = 3


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


def read(dataset: xr.Dataset, index: int, rows: slice, columns: slice) -> np.ndarray:
    """[20, rows, columns]"""
    # .variable: without the coordinates, which take as long to index as a small field takes to read
    return np.stack([dataset.variables[name][index, rows, columns].values for name in VARIABLES])


def tile_of(layout: tuple[int, int], place: int) -> tuple[slice, slice]:
    return Decomposition(GRID, ProcessMesh.on_paper(polar=layout[0], azimuth=layout[1])).tile(place)


def seconds_a_sample(one: Callable[[int], object], times: int, wait: Callable = lambda: None) -> tuple[float, float]:
    """(by the clock, of the CPUs in this process) for random times, each of the fastest round."""
    rounds = []
    for number in range(ROUNDS):
        order = np.random.default_rng(number).permutation(times)
        wait()
        start, start_cpu = time.perf_counter(), time.process_time()
        for index in order:
            one(int(index))
        cpu = time.process_time() - start_cpu
        wait()
        rounds.append(((time.perf_counter() - start) / times, cpu / times))
    clock, cpus = zip(*rounds, strict=True)
    return min(clock), min(cpus)


def print_chunks(folder: Path) -> None:
    print("| store | polar x azimuth | needed KiB | touched / needed | worst process |\n|---|---|---|---|---|")
    for name in (GLOBE_NC, SERIES_NC, GLOBE_ZARR, TILES_ZARR):
        dataset = open_dataset(folder / name)
        for polar, azimuth in LAYOUTS:
            reads = tile_reads(dataset, ProcessMesh.on_paper(polar=polar, azimuth=azimuth))
            needed, touched = (sum(getattr(tile, what) for tile in reads) for what in ("needed", "touched"))
            worst = max(tile.touched / tile.needed for tile in reads)
            cells = f"{needed / len(reads) / 1024:.0f} | {touched / needed:.2f} | {worst:.2f}"
            print(f"| {name} | {polar} x {azimuth} | {cells} |")


def _tile_process(path: Path, layout, place: int, times: int, barrier, results) -> None:
    torch.set_num_threads(1)
    dataset = open_dataset(path)
    rows, columns = tile_of(layout, place)
    read(dataset, 0, rows, columns)
    # all processes of a replica read the same times
    results.put(seconds_a_sample(lambda index: read(dataset, index, rows, columns), times, barrier.wait))


def seconds_together(path: Path, layout: tuple[int, int], times: int) -> tuple[float, float]:
    """A sample, each process of the layout its tile: the slowest by the clock and by its CPU."""
    context = multiprocessing.get_context("spawn")
    count = layout[0] * layout[1]
    barrier, results = context.Barrier(count), context.Queue()
    arguments = [(path, layout, place, times, barrier, results) for place in range(count)]
    processes = [context.Process(target=_tile_process, args=each) for each in arguments]
    for process in processes:
        process.start()
    found = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    clock, cpus = zip(*found, strict=True)
    return max(clock), max(cpus)


def print_speed(folder: Path, times: int) -> None:
    print("\n| store | reader | processes | samples/s | CPU ms of a process |\n|---|---|---|---|---|")

    def line(name: str, reader: str, processes: int, seconds: tuple[float, float]) -> None:
        print(f"| {name} | {reader} | {processes} | {1 / seconds[0]:.0f} | {1e3 * seconds[1]:.1f} |", flush=True)

    whole, quarter = tile_of((1, 1), 0), tile_of((2, 2), 3)
    for name in (GLOBE_NC, GLOBE_ZARR, TILES_ZARR):
        how = {} if name.endswith(".nc") else {"engine": "zarr", "consolidated": False}
        plain = xr.open_dataset(folder / name, chunks=None, **how)
        line(
            name,
            "plain xarray, globe",
            1,
            seconds_a_sample(lambda i, d=plain: d.isel(time=i).load(), times),
        )
        ours = open_dataset(folder / name)
        line(name, "open_dataset, globe", 1, seconds_a_sample(lambda i, d=ours: read(d, i, *whole), times))
        line(name, "open_dataset, a quarter", 1, seconds_a_sample(lambda i, d=ours: read(d, i, *quarter), times))
        line(name, "open_dataset, tiles of 2 x 2 together", 4, seconds_together(folder / name, (2, 2), times))
    with netCDF4.Dataset(folder / GLOBE_NC) as file:
        for what, (rows, columns) in (("globe", whole), ("a quarter", quarter)):

            def plain_netcdf(index: int, rows: slice = rows, columns: slice = columns) -> np.ndarray:
                return np.stack([file[name][index, rows, columns] for name in VARIABLES])

            line(GLOBE_NC, f"plain netCDF4 slicing, {what}", 1, seconds_a_sample(plain_netcdf, times))


def print_memory(folder: Path) -> None:
    """Peak of what Python and numpy hold while 8 times are read and kept."""
    print("\n| store | polar x azimuth | share of the globe | peak MiB for 8 times |\n|---|---|---|---|")
    for name in (GLOBE_NC, TILES_ZARR):
        dataset = open_dataset(folder / name)
        for layout in ((1, 1), (1, 2), (2, 2), (2, 4)):
            rows, columns = tile_of(layout, 0)
            read(dataset, 0, rows, columns)
            tracemalloc.start()
            kept = [read(dataset, index, rows, columns) for index in range(8)]
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            share = kept[0][0].size / (GRID.nlat * GRID.nlon)
            print(f"| {name} | {layout[0]} x {layout[1]} | {share:.3f} | {peak / 2**20:.1f} |")


class Samples(Dataset):
    def __init__(self, path: Path, times: int) -> None:
        self.dataset, self.times, self.tile = open_dataset(path), times, tile_of((2, 2), 3)

    def __len__(self) -> int:
        return self.times

    def __getitem__(self, item: int) -> torch.Tensor:
        return torch.from_numpy(read(self.dataset, item, *self.tile))


def print_wait(folder: Path, times: int) -> None:
    """A step that computes for some multiple of what reading takes, and one worker that reads ahead."""
    print("\n| store | step / read | waited, share of the epoch after its first step |\n|---|---|---|")
    for name in (GLOBE_NC, TILES_ZARR):
        samples = Samples(folder / name, times)
        reading, _ = seconds_a_sample(samples.__getitem__, times)
        for factor in (1.2, 2.0):
            loader = DataLoader(samples, batch_size=1, num_workers=1, prefetch_factor=4, multiprocessing_context="fork")
            waited, total, batches = 0.0, 0.0, iter(loader)
            next(batches)
            while True:
                start = time.perf_counter()
                batch = next(batches, None)
                waited += time.perf_counter() - start
                if batch is None:
                    break
                time.sleep(factor * reading)  # as a GPU computes, without the CPU
                total += time.perf_counter() - start
            print(f"| {name} | {factor} | {100 * waited / total:.1f} % |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=48)
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
