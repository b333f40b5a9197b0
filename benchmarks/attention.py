"""Speed and memory of the compiled spherical attention, next to matrix multiplication and, with --peer, a peer.

    python benchmarks/attention.py [--peer] [--rows 1 2] [--repeats 7] [--csv results.csv]
    python benchmarks/attention.py --device cuda [--peer] [--rows 1 2] [--numbers bfloat16] [--csv results.csv]

The limit is ``torch.mm`` of 2048^3 measured between the rows. Useful flops are 4 C pairs forward and 10 C pairs
backward (C channels, pairs of query and key). The peer is torch-harmonics' NeighborhoodAttentionS2: its op alone,
channels-last inputs, as ours. Times are medians of wall-clock times in one process on torch.get_num_threads() threads.
Extra memory is the peak resident memory of a backward pass beyond inputs, outputs and gradients (Linux only).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import attention_cuda
import torch
from table import CHANNELS, PROBLEM_COLUMNS, ROWS, Table, problem

from sfno_dist.geometry import Grid, Neighbourhood
from sfno_dist.ops import compiled


def median_ms(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def sgemm_flops_per_ms(repeats: int = 5) -> float:
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    torch.mm(a, b)
    return 2.0 * 2048**3 / median_ms(lambda: torch.mm(a, b), repeats)


def resident_mb(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) / 1024.0


def extra_mb(run: Callable[[], object], results_mb: float) -> float:
    """Peak resident memory while ``run`` works, beyond what was there before and what it returns."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # or results land in memory that earlier ones left behind
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except (OSError, AttributeError):
        return float("nan")
    before = resident_mb("VmRSS")
    results = run()
    peak = resident_mb("VmHWM") - before - results_mb
    del results
    return max(0.0, peak)


class Ours:
    def __init__(self, keys: tuple[int, int], queries: tuple[int, int], cutoff: float, heads: int) -> None:
        start = time.perf_counter()
        grid_in, grid_out = Grid("equiangular", *keys), Grid("equiangular", *queries)
        neighbourhood = Neighbourhood(grid_in, grid_out, cutoff)
        rows = torch.tensor([[0, grid_in.nlon, h * grid_in.nlon] for h in range(grid_in.nlat)])
        tables = (torch.from_numpy(neighbourhood.half_widths), torch.from_numpy(grid_in.cell_areas.copy()), rows)
        self.construction_ms = 1e3 * (time.perf_counter() - start)
        self.table_mb = sum(table.nbytes for table in tables) / 2**20
        self.pairs = int(neighbourhood.neighbours_per_row().sum())
        self.arguments = (*tables, grid_out.nlon, grid_in.nlon, 0)
        width = CHANNELS // heads

        def values(*points: int) -> torch.Tensor:  # [1, N, points..., D] over channels-last memory
            return torch.randn(1, *points, heads, width).movedim(-2, 1)

        self.q = values(*queries) * width**-0.5
        self.k, self.v = values(keys[0] * keys[1]), values(keys[0] * keys[1])
        self.dy = values(*queries)
        self.y, self.lse = self.forward()

    def forward(self):
        return compiled.forward(self.q, self.k, self.v, *self.arguments)

    def backward(self):
        return compiled.backward(self.dy, None, self.q, self.k, self.v, self.y, self.lse, *self.arguments, True, True)

    def measure(self, repeats: int) -> dict[str, float]:
        return {
            "forward": median_ms(self.forward, repeats),
            "backward": median_ms(self.backward, repeats),
            "extra_mb": extra_mb(self.backward, sum(x.nbytes for x in (self.q, self.k, self.v)) / 2**20),
            "construction": self.construction_ms,
            "tables_mb": self.table_mb,
        }


class Peer:
    def __init__(self, ours: Ours, keys: tuple[int, int], queries: tuple[int, int], cutoff: float, heads: int) -> None:
        from torch_harmonics import NeighborhoodAttentionS2

        start = time.perf_counter()
        self.module = NeighborhoodAttentionS2(CHANNELS, keys, queries, num_heads=heads, theta_cutoff=cutoff, bias=False)
        self.construction_ms = 1e3 * (time.perf_counter() - start)

        def packed(x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:  # heads packed in the channels
            return x.movedim(1, -2).reshape(1, *shape, CHANNELS)

        self.q = packed(ours.q, queries).clone().requires_grad_()
        self.k, self.v = (packed(x, keys).clone().requires_grad_() for x in (ours.k, ours.v))
        self.dy = packed(ours.dy, queries)
        difference = (self.forward().detach() - packed(ours.y, queries)).abs().max()
        if difference > 1e-3:
            raise RuntimeError(f"the peer computes something else: largest difference {difference:g}")

    def forward(self):
        m = self.module
        tables = (m.psi_col_idx, m.psi_roff_idx, m.psi_seg, m.psi_seg_off)
        sizes = (m.num_heads, m.nlon_in, m.nlat_out, m.nlon_out)
        return m.attention_handle(self.k, self.v, self.q, m.quad_weights, *tables, *sizes)

    def measure(self, repeats: int) -> dict[str, float]:
        y = self.forward()
        times: list[float] = []

        def backward():
            start = time.perf_counter()
            gradients = torch.autograd.grad(y, (self.k, self.v, self.q), self.dy, retain_graph=True)
            times.append(1e3 * (time.perf_counter() - start))
            return gradients

        with torch.no_grad():
            forward = median_ms(self.forward, repeats)
        results_mb = sum(x.nbytes for x in (self.q, self.k, self.v)) / 2**20
        extra = extra_mb(backward, results_mb)
        for _ in range(2 if times[0] < 3000.0 else 0):  # the long ones once
            backward()
        return {
            "forward": forward,
            "backward": statistics.median(times),
            "extra_mb": extra,
            "construction": self.construction_ms,
            "tables_mb": sum(buffer.nbytes for buffer in self.module.buffers()) / 2**20,
        }


def measure_row(number: int, repeats: int, with_peer: bool) -> dict[str, object]:
    keys, queries, cutoff, heads = ROWS[number - 1]
    ours = Ours(keys, queries, cutoff, heads)
    before = sgemm_flops_per_ms()
    mine = ours.measure(repeats)
    limit = (before + sgemm_flops_per_ms()) / 2.0
    result = problem(number) | {"pairs_millions": ours.pairs / 1e6, "sgemm_gflops": limit / 1e6}
    result |= {f"ours_{name}": value for name, value in mine.items()}
    for name, factor in (("forward", 4), ("backward", 10)):
        result[f"{name}_percent_of_sgemm"] = 100.0 * factor * CHANNELS * ours.pairs / (mine[name] * limit)
    if with_peer:
        theirs = Peer(ours, keys, queries, cutoff, heads).measure(min(repeats, 3))
        result |= {f"peer_{name}": value for name, value in theirs.items()}
        result |= {f"{name}_ratio": theirs[name] / mine[name] for name in ("forward", "backward")}
    return result


COLUMNS = (
    *PROBLEM_COLUMNS,
    ("Mpairs", "pairs_millions", ".2f"),
    ("fwd ms", "ours_forward", ".1f"),
    ("peer", "peer_forward", ".0f"),
    ("ratio", "forward_ratio", ".1f"),
    ("%sgemm", "forward_percent_of_sgemm", ".1f"),
    ("bwd ms", "ours_backward", ".1f"),
    ("peer", "peer_backward", ".0f"),
    ("ratio", "backward_ratio", ".1f"),
    ("%sgemm", "backward_percent_of_sgemm", ".1f"),
    ("build ms", "ours_construction", ".1f"),
    ("peer", "peer_construction", ".0f"),
    ("tables MB", "ours_tables_mb", ".2f"),
    ("peer", "peer_tables_mb", ".1f"),
    ("extra MB", "ours_extra_mb", ".0f"),
    ("peer", "peer_extra_mb", ".0f"),
    ("sgemm GF/s", "sgemm_gflops", ".0f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--numbers", nargs="+", choices=list(attention_cuda.NUMBERS), help="on a GPU; all by default")
    parser.add_argument("--peer", action="store_true", help="measure torch-harmonics too (minutes)")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of the table, from 1")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    if options.device == "cuda":
        return attention_cuda.main(options.rows, options.numbers, options.peer, options.csv)
    torch.manual_seed(0)
    print(compiled.description(), f"; {torch.get_num_threads()} threads; torch {torch.__version__}", sep="")
    columns = [column for column in COLUMNS if options.peer or not ("peer" in column[1] or "ratio" in column[1])]
    table = Table(columns, options.csv)
    for number in options.rows or range(1, len(ROWS) + 1):
        table.add(measure_row(number, options.repeats, options.peer))


if __name__ == "__main__":
    main()
