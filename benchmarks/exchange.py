"""What each process receives by exchange and layout, counted from the plans, and how attention's work is balanced.

    python benchmarks/exchange.py [--time]

Columns of keys (values take the same again) per process for one forward pass; backward returns the gradients of as
many. A ring receives the rows from north and south once and every other chunk of its row of tiles. ``--time`` runs
forward and backward of one layer on 4 gloo processes at 180x360, in one thread each.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist

from sfno_dist import Decomposition, Grid, Neighbourhood, ProcessMesh, SphericalAttention
from sfno_dist.comm import Reach, halo_plan, latitude_plan

CHANNELS = 64
# (grid, cutoff in radians)
GRIDS = (((180, 360), 0.053), ((721, 1440), 0.0131))
LAYOUTS = ((1, 4), (2, 2), (4, 1), (2, 4), (4, 2))


def columns(neighbourhood: Neighbourhood, polar: int, azimuth: int) -> dict[str, list[int]]:
    """Received by each process of the layout."""
    received: dict[str, list[int]] = {"halo": [], "ring": []}
    for rank in range(polar * azimuth):
        tile = Decomposition(neighbourhood.grid_in, ProcessMesh.on_paper(polar=polar, azimuth=azimuth, rank=rank))
        reach = Reach(neighbourhood, tile, tile)
        received["halo"].append(halo_plan(reach).received)
        rows = reach.rows(rank) if polar > 1 else (0, neighbourhood.grid_in.nlat)
        passing = (rows[1] - rows[0]) * (neighbourhood.grid_in.nlon - tile.tile_shape[1])
        received["ring"].append(passing + (latitude_plan(reach).received if polar > 1 else 0))
    return received


def timed(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=4)
    for polar, azimuth in ((1, 4), (2, 2)):
        mesh = ProcessMesh(1, polar, azimuth)
        for exchange in ("halo", "ring"):
            layer = SphericalAttention(CHANNELS, Grid("equiangular", 180, 360), mesh=mesh, exchange=exchange)
            x = torch.randn(1, CHANNELS, *layer.queries.tile_shape, requires_grad=True)
            times = []
            for _ in range(6):
                dist.barrier()
                start = time.perf_counter()
                layer(x).sum().backward()
                dist.barrier()
                times.append(1e3 * (time.perf_counter() - start))
            if rank == 0:
                print(f"| {polar}x{azimuth} | {exchange} | {np.median(times[1:]):.0f} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true")
    arguments = parser.parse_args()
    print("| grid | cutoff | polar x azimuth | halo columns mean (max) | ring | ratio | halo MB float32 |")
    for shape, cutoff in GRIDS:
        neighbourhood = Neighbourhood(Grid("equiangular", *shape), None, cutoff)
        for layout in LAYOUTS:
            received = columns(neighbourhood, *layout)
            halo, ring = np.mean(received["halo"]), np.mean(received["ring"])
            mb = 4 * 4 * CHANNELS * halo / 2**20  # keys, values, and the gradients of both
            cells = (f"{shape[0]}x{shape[1]}", cutoff, f"{layout[0]}x{layout[1]}")
            print(f"| {cells[0]} | {cells[1]} | {cells[2]} | {halo:.0f} ({max(received['halo'])}) ", end="")
            print(f"| {ring:.0f} | {ring / halo:.1f} | {mb:.1f} |")
    work = neighbourhood.neighbours_per_row()
    for balance in ("count", "work"):
        mesh = ProcessMesh.on_paper(polar=8, row_balance=balance)
        pairs = np.add.reduceat(work, Decomposition(neighbourhood.grid_in, mesh).row_bounds[:-1])
        print(f"8 polar cuts of 721x1440 by {balance}: busiest process {pairs.max() / pairs.mean():.2f} times the mean")
    if arguments.time:
        print("| polar x azimuth | exchange | forward + backward ms |")
        torch.multiprocessing.spawn(timed, (29641,), 4)


if __name__ == "__main__":
    main()
