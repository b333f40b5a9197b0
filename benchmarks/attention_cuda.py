"""``python benchmarks/attention.py --device cuda``: correctness against float64 first, then times on a GPU.

Times are medians over CUDA events, the calls queued while the device is kept busy; beside them stands the host's time
for one call. Inputs rotate, so that no call finds its own in the cache. The limits are measured too: a product of two
8192^2 matrices in the same arithmetic and a copy of 1 GiB. Least bytes are those of the inputs and results, each moved
once; useful flops are 4 C pairs forward and 10 C pairs backward (C channels, pairs of query and key).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
from table import CHANNELS, PROBLEM_COLUMNS, ROWS, Table, problem

from sfno_dist.geometry import Grid, Neighbourhood
from sfno_dist.ops import Window, compiled_cuda, reference

NUMBERS = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {"float32": 1e-5, "tf32": 5e-3, "bfloat16": 2e-2, "float16": 4e-3}  # norm of error over norm
ROTATION = 3


def median_ms(run: Callable[[], object], repeats: int = 20) -> tuple[float, float]:
    """Of the device and of the host, for one call."""
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # clock cycles; or short kernels would be timed while they wait for the host
    begin = time.perf_counter()
    for start, end in events:
        start.record()
        run()
        end.record()
    host = 1e3 * (time.perf_counter() - begin) / repeats
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events), host


def product_flops_per_ms(dtype: torch.dtype) -> float:
    a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    return 2.0 * 8192**3 / median_ms(lambda: a @ a, 5)[0]


def copied_bytes_per_ms() -> float:
    a, b = (torch.empty(2**28, device="cuda") for _ in range(2))
    return 2.0 * a.nbytes / median_ms(lambda: b.copy_(a))[0]


class Inputs:
    """One set of tensors [1, N, points..., D] over channels-last memory."""

    def __init__(self, keys: tuple[int, int], queries: tuple[int, int], heads: int, dtype: torch.dtype) -> None:
        def values(*points: int) -> torch.Tensor:
            return torch.randn(1, *points, heads, CHANNELS // heads, device="cuda").to(dtype).movedim(-2, 1)

        self.q, self.dy = values(*queries) * (CHANNELS // heads) ** -0.5, values(*queries)
        self.k, self.v = values(keys[0] * keys[1]), values(keys[0] * keys[1])


class Ours:
    def __init__(self, keys, queries, cutoff: float, heads: int, dtype: torch.dtype) -> None:
        neighbourhood = Neighbourhood(Grid("equiangular", *keys), Grid("equiangular", *queries), cutoff)
        window = Window.whole(neighbourhood)
        self.pairs = int(neighbourhood.neighbours_per_row().sum())
        device = torch.device("cuda")
        self.tables = (*window.tables(device), queries[1], keys[1], 0)
        self.schedule = window.schedule(device)
        self.sets = [Inputs(keys, queries, heads, dtype) for _ in range(ROTATION)]
        self.results = [self.forward(x) for x in self.sets]

    def forward(self, x: Inputs):
        return compiled_cuda.forward(x.q, x.k, x.v, *self.tables, *self.schedule)

    def backward(self, x: Inputs, y: torch.Tensor, lse: torch.Tensor):
        return compiled_cuda.backward(x.dy, None, x.q, x.k, x.v, y, lse, *self.tables, *self.schedule, True, True)

    def error(self) -> float:
        """Largest relative error of y, dq, dk and dv against float64."""
        x, (y, lse) = self.sets[0], self.results[0]
        wide = [t.double() for t in (x.q, x.k, x.v)]
        exact_y, exact_lse = reference.forward(*wide, *self.tables)
        exact = reference.backward(x.dy.double(), None, *wide, exact_y, exact_lse, *self.tables, True, True)
        results = zip((y, *self.backward(x, y, lse)), (exact_y, *exact), strict=True)
        return max(float((got.double() - true).norm() / true.norm()) for got, true in results)

    def measure(self) -> tuple[tuple[float, float], tuple[float, float]]:
        inputs = cycle(zip(self.sets, self.results, strict=True))

        def backward() -> None:
            x, (y, lse) = next(inputs)
            self.backward(x, y, lse)

        return median_ms(lambda: self.forward(next(inputs)[0])), median_ms(backward)

    def least_bytes(self) -> tuple[int, int]:
        x = self.sets[0]
        statistics_bytes = 4 * x.q[..., 0].numel()
        forward = x.q.nbytes + x.k.nbytes + x.v.nbytes + x.dy.nbytes + statistics_bytes
        return forward, forward + x.dy.nbytes + x.q.nbytes + x.k.nbytes + x.v.nbytes


class Peer:
    """torch-harmonics 0.8.0, the last release with its CUDA kernels in the source on PyPI; they compute in float32."""

    def __init__(self, ours: Ours, keys, queries, cutoff: float, heads: int) -> None:
        import attention_cuda_extension
        from torch_harmonics import NeighborhoodAttentionS2

        options = {"num_heads": heads, "theta_cutoff": cutoff, "bias": False}
        m = NeighborhoodAttentionS2(CHANNELS, keys, queries, **options).cuda()
        self.kernels = attention_cuda_extension
        self.tables = m.quad_weights, m.psi_col_idx, m.psi_roff_idx, m.nlon_in, m.nlat_out, m.nlon_out

        def packed(x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:  # [N, D, H, W], channels last in memory
            return x[0].reshape(heads, *shape, -1).float().contiguous().movedim(-1, 1)

        self.sets = [
            (packed(x.k, keys), packed(x.v, keys), packed(x.q, queries), packed(x.dy, queries)) for x in ours.sets
        ]
        got, expected = self.kernels.forward(*self.sets[0][:3], *self.tables), packed(ours.results[0][0], queries)
        difference = float((got - expected).abs().max() / expected.abs().max())
        if not difference < 5e-2:
            raise RuntimeError(f"the peer computes something else: largest relative difference {difference:g}")

    def measure(self) -> tuple[float, float]:
        sets = cycle(self.sets)
        forward = median_ms(lambda: self.kernels.forward(*next(sets)[:3], *self.tables), 7)
        return forward[0], median_ms(lambda: self.kernels.backward_dkvq(*next(sets), *self.tables), 7)[0]


def measure_row(number: int, kind: str, bandwidth: float, with_peer: bool) -> dict[str, object]:
    keys, queries, cutoff, heads = ROWS[number - 1]
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    peak = product_flops_per_ms(NUMBERS[kind])
    ours = Ours(keys, queries, cutoff, heads, NUMBERS[kind])
    result = problem(number) | {"numbers": kind, "pairs_millions": ours.pairs / 1e6, "error": ours.error()}
    theirs = Peer(ours, keys, queries, cutoff, heads).measure() if with_peer else (math.nan, math.nan)
    passes = zip(("forward", "backward"), (4, 10), ours.measure(), theirs, ours.least_bytes(), strict=True)
    for name, factor, (mine, host), other, least in passes:
        flops = factor * CHANNELS * ours.pairs
        result |= {
            f"{name}_ms": mine,
            f"{name}_host_ms": host,
            f"{name}_peer_ms": other,
            f"{name}_ratio": other / mine,
            f"{name}_percent_of_bandwidth": 100.0 * least / (mine * bandwidth),
            f"{name}_percent_of_product": 100.0 * flops / (mine * peak),
            f"{name}_times_floor": mine / max(least / bandwidth, flops / peak),
        }
    return result


COLUMNS = (
    ("row", "row", "d"),
    *PROBLEM_COLUMNS,
    ("numbers", "numbers", "s"),
    ("Mpairs", "pairs_millions", ".2f"),
    ("error", "error", ".1e"),
    *(
        (title, f"{name}_{key}", form)
        for name, short in (("forward", "fwd"), ("backward", "bwd"))
        for title, key, form in (
            (f"{short} ms", "ms", ".3f"),
            ("host", "host_ms", ".3f"),
            ("peer", "peer_ms", ".2f"),
            ("ratio", "ratio", ".1f"),
            ("%copy", "percent_of_bandwidth", ".1f"),
            ("%mm", "percent_of_product", ".1f"),
            ("x floor", "times_floor", ".1f"),
        )
    ),
)


def main(numbers: list[int] | None, kinds: list[str] | None, with_peer: bool, csv_path: Path | None) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda needs a CUDA device, and PyTorch finds none here")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; CUDA {torch.version.cuda}")
    bandwidth = copied_bytes_per_ms()
    table, wrong = Table(COLUMNS, csv_path), []
    for number in numbers or range(1, len(ROWS) + 1):
        for kind in kinds or NUMBERS:
            result = measure_row(number, kind, bandwidth, with_peer)
            table.add(result)
            if not result["error"] < TOLERANCE[kind]:
                wrong.append(f"row {number} in {kind}: error {result['error']:g}, expected below {TOLERANCE[kind]}")
    if wrong:
        raise SystemExit("\n".join(wrong))
