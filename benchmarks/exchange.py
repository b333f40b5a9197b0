"""What each process receives by exchange and layout, planned and counted, how long it takes, how work is balanced.

    python benchmarks/exchange.py             plans only, seconds
    python benchmarks/exchange.py --run       also runs every layout on gloo processes of one thread each, minutes

Columns of keys are those of one forward pass (values take the same again). Megabytes are per process for forward and
backward of one layer in float32: by plan, as PyTorch was asked to receive, and as the loopback device saw it pass
(with what TCP adds), divided by the processes.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from sfno_dist import Decomposition, Grid, Neighbourhood, ProcessMesh, SphericalAttention
from sfno_dist.layers.exchange import make_exchange

CHANNELS = 16  # bytes are proportional to them
GRIDS = (((180, 360), 0.053), ((721, 1440), 0.0131))  # and cutoff in radians
LAYOUTS = ((1, 4), (2, 2), (4, 1), (2, 4), (4, 2))
MB = 2**20


def planned(neighbourhood: Neighbourhood, polar: int, azimuth: int) -> dict[str, tuple[list[int], list[float]]]:
    """For each process of the layout: columns received in forward, and MB in forward and backward; by exchange."""
    columns: dict[str, list[int]] = {"halo": [], "ring": []}
    values: dict[str, list[int]] = {"halo": [], "ring": []}
    for rank in range(polar * azimuth):
        tile = Decomposition(neighbourhood.grid_in, ProcessMesh.on_paper(polar=polar, azimuth=azimuth, rank=rank))
        halo, around = (make_exchange(name, neighbourhood, tile, tile) for name in ("halo", "ring"))
        columns["halo"].append(halo.gather.plan.received)
        values["halo"].append(halo.gather.plan.received + halo.gather.plan.sent)
        latitudes = around.latitudes
        points = around.ring.points if azimuth > 1 else (0,)
        arriving, leaving = (latitudes.plan.received, latitudes.plan.sent) if latitudes else (0, 0)
        passing = sum(points) - points[tile.mesh.azimuth_index]
        columns["ring"].append(passing + arriving)
        # Chunks pass in forward and in backward, where the sums of all chunks follow them.
        values["ring"].append(2 * passing + sum(points) + arriving + leaving)
    return {name: (columns[name], [v * 2 * CHANNELS * 4 / MB for v in values[name]]) for name in columns}


class Wire:
    """Counts what PyTorch is asked to receive, and can hold up every message by ``delay`` seconds."""

    def __init__(self) -> None:
        self.received, self.delay, self.plain = 0, 0.0, dist.batch_isend_irecv
        dist.batch_isend_irecv = self

    def __call__(self, operations: list[dist.P2POp]) -> list:
        self.received += sum(o.tensor.nbytes for o in operations if o.op is dist.irecv)
        due = time.perf_counter() + self.delay
        return [Late(work, due) for work in self.plain(operations)]


class Late:
    """A message that takes until ``due`` at least."""

    def __init__(self, work: dist.Work, due: float) -> None:
        self.work, self.due = work, due

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))


def loopback_bytes() -> int:
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def step_ms(layer: SphericalAttention, x: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    layer(x).sum().backward()
    dist.barrier()
    return 1e3 * (time.perf_counter() - start)


def run(rank: int, size: int, port: int, layouts: list[tuple[int, int]]) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    wire = Wire()
    for shape, cutoff in GRIDS:
        neighbourhood = Neighbourhood(Grid("equiangular", *shape), None, cutoff)
        for polar, azimuth in layouts:
            plan = planned(neighbourhood, polar, azimuth) if rank == 0 else {}
            for exchange in ("halo", "ring"):
                mesh = ProcessMesh(1, polar, azimuth)
                torch.manual_seed(0)
                layer = SphericalAttention(
                    CHANNELS, neighbourhood.grid_in, theta_cutoff=cutoff, mesh=mesh, exchange=exchange
                )
                x = torch.randn(1, CHANNELS, *layer.queries.tile_shape, requires_grad=True)
                step_ms(layer, x)
                wire.received, before = 0, loopback_bytes()
                step_ms(layer, x)
                counted = torch.tensor([float(wire.received), float(loopback_bytes() - before) / size])
                received = [torch.empty(2) for _ in range(size)]
                dist.all_gather(received, counted)
                if rank == 0:
                    columns, megabytes = plan[exchange]
                    per_process = torch.stack(received) / MB
                    cells = f"| {shape[0]}x{shape[1]} | {polar}x{azimuth} | {exchange} "
                    cells += f"| {np.mean(columns):.0f} ({max(columns)}) | {np.mean(megabytes):.2f} "
                    print(cells + f"| {per_process[:, 0].mean():.2f} | {per_process[0, 1]:.2f} |", flush=True)
    dist.destroy_process_group()


def timed(rank: int, size: int, port: int, delays: list[float]) -> None:
    """180x360, 64 channels: milliseconds of forward + backward by layout, exchange and delay of every message."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    wire = Wire()
    for polar, azimuth in ((1, 4), (2, 2)):
        mesh = ProcessMesh(1, polar, azimuth)
        torch.manual_seed(0)
        layers = {
            name: SphericalAttention(64, Grid("equiangular", 180, 360), mesh=mesh, exchange=name)
            for name in ("halo", "ring")
        }
        times: dict[tuple[str, float], list[float]] = {(name, delay): [] for name in layers for delay in delays}
        for _ in range(7):  # in turn, so that what else the machine does meets all of them
            for (name, wire.delay), found in times.items():
                x = torch.randn(1, 64, *layers[name].queries.tile_shape, requires_grad=True)
                found.append(step_ms(layers[name], x))
        if rank == 0:
            for name in layers:
                cells = " | ".join(f"{np.median(times[name, delay][1:]):.0f}" for delay in delays)
                print(f"| {polar}x{azimuth} | {name} | {cells} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="also count and time on processes of this machine")
    arguments = parser.parse_args()
    print("| grid | cutoff | polar x azimuth | halo columns mean (max) | ring | ratio |")
    for shape, cutoff in GRIDS:
        neighbourhood = Neighbourhood(Grid("equiangular", *shape), None, cutoff)
        for layout in LAYOUTS:
            plan = planned(neighbourhood, *layout)
            halo, ring = (np.mean(plan[name][0]) for name in ("halo", "ring"))
            print(f"| {shape[0]}x{shape[1]} | {cutoff} | {layout[0]}x{layout[1]} ", end="")
            print(f"| {halo:.0f} ({max(plan['halo'][0])}) | {ring:.0f} | {ring / halo:.1f} |")
    work = neighbourhood.neighbours_per_row()
    for balance in ("count", "work"):
        mesh = ProcessMesh.on_paper(polar=8, row_balance=balance)
        pairs = np.add.reduceat(work, Decomposition(neighbourhood.grid_in, mesh).row_bounds[:-1])
        print(f"8 polar cuts of 721x1440 by {balance}: busiest process {pairs.max() / pairs.mean():.2f} times the mean")
    if arguments.run:
        print("| grid | polar x azimuth | exchange | columns mean (max) | MB by plan | MB received | MB on loopback |")
        for number, size in enumerate((4, 8)):
            layouts = [layout for layout in LAYOUTS if layout[0] * layout[1] == size]
            torch.multiprocessing.spawn(run, (size, 29641 + number, layouts), size)
        delays = [0.0, 0.01, 0.03, 0.1]
        print("forward + backward, ms, by delay of every message")
        print("| polar x azimuth | exchange | " + " | ".join(f"{1e3 * d:.0f} ms" for d in delays) + " |")
        torch.multiprocessing.spawn(timed, (4, 29651, delays), 4)


if __name__ == "__main__":
    main()
