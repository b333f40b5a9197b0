"""``python benchmarks/attention.py --device cuda``: correctness against float64 first, then times on a GPU.

Times are medians over CUDA events; inputs rotate, so that no call finds its own in the cache. The limits are measured
too: a product of two 8192^2 matrices in the same arithmetic and a copy of 1 GiB. Least bytes are those of the inputs
and results, each moved once; useful flops are 4 C pairs forward and 10 C pairs backward (C channels, pairs of query
and key).
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import torch

from sfno_dist.geometry import Grid, Neighbourhood
from sfno_dist.ops import Window, compiled_cuda, reference

CHANNELS = 64
# (keys, queries, cutoff in radians, heads)
ROWS = (
    ((180, 360), (180, 360), 0.017, 1),
    ((361, 720), (361, 720), 0.03, 1),
    ((181, 360), (181, 360), 0.053, 4),
    ((360, 720), (180, 360), 0.03, 1),
    ((180, 360), (360, 720), 0.03, 1),
    ((721, 1440), (721, 1440), 0.0132, 1),
)
NUMBERS = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {"float32": 1e-5, "tf32": 5e-3, "bfloat16": 2e-2, "float16": 4e-3}  # norm of error over norm
ROTATION = 3


def median_ms(run: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def product_flops_per_ms(dtype: torch.dtype) -> float:
    a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    return 2.0 * 8192**3 / median_ms(lambda: a @ a)


def copied_bytes_per_ms() -> float:
    a, b = (torch.empty(2**28, device="cuda") for _ in range(2))
    return 2.0 * a.nbytes / median_ms(lambda: b.copy_(a))


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

    def check(self, number: str) -> float:
        """Largest relative error of y, dq, dk and dv against float64; ``RuntimeError`` beyond the tolerance."""
        x, (y, lse) = self.sets[0], self.results[0]
        wide = [t.double() for t in (x.q, x.k, x.v)]
        exact_y, exact_lse = reference.forward(*wide, *self.tables)
        exact = reference.backward(x.dy.double(), None, *wide, exact_y, exact_lse, *self.tables, True, True)
        errors = {
            name: float((got.double() - true).norm() / true.norm())
            for name, got, true in zip(
                ("y", "dq", "dk", "dv"), (y, *self.backward(x, y, lse)), (exact_y, *exact), strict=True
            )
        }
        if not max(errors.values()) < TOLERANCE[number]:
            raise RuntimeError(f"{number} is wrong: relative errors {errors}, expected below {TOLERANCE[number]}")
        return max(errors.values())

    def measure(self) -> tuple[float, float]:
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
    def __init__(self, ours: Ours, keys, queries, cutoff: float, heads: int) -> None:
        from torch_harmonics import NeighborhoodAttentionS2

        options = {"num_heads": heads, "theta_cutoff": cutoff, "bias": False}
        self.module = NeighborhoodAttentionS2(CHANNELS, keys, queries, **options).cuda()
        self.sets = []
        for x in ours.sets:

            def packed(t: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:  # heads packed in the channels
                return t.movedim(1, -2).reshape(1, *shape, CHANNELS).clone()

            q, k, v = packed(x.q, queries), packed(x.k, keys), packed(x.v, keys)
            self.sets.append([t.requires_grad_() for t in (k, v, q)] + [packed(x.dy, queries)])
        expected = ours.results[0][0].movedim(1, -2).reshape(1, *queries, CHANNELS)
        difference = float((self.forward(self.sets[0]).detach() - expected).abs().max() / expected.abs().max())
        if not difference < 5e-2:
            raise RuntimeError(f"the peer computes something else: largest relative difference {difference:g}")

    def forward(self, tensors):
        m = self.module
        tables = (m.psi_col_idx, m.psi_roff_idx, m.psi_seg, m.psi_seg_off)
        return m.attention_handle(*tensors[:3], m.quad_weights, *tables, m.num_heads, m.nlon_in, m.nlat_out, m.nlon_out)

    def measure(self) -> tuple[float, float]:
        sets = cycle(self.sets)
        with torch.no_grad():
            forward = median_ms(lambda: self.forward(next(sets)), repeats=7)
        graphs = cycle([(self.forward(x), x) for x in self.sets])

        def backward() -> None:
            y, x = next(graphs)
            torch.autograd.grad(y, x[:3], x[3], retain_graph=True)

        return forward, median_ms(backward, repeats=7)


def rows(numbers: list[int], kinds: list[str], with_peer: bool) -> Iterator[dict[str, object]]:
    bandwidth = copied_bytes_per_ms()
    for number in numbers:
        keys, queries, cutoff, heads = ROWS[number - 1]
        for kind in kinds:
            torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
            peak = product_flops_per_ms(NUMBERS[kind])
            ours = Ours(keys, queries, cutoff, heads, NUMBERS[kind])
            result: dict[str, object] = {
                "row": number,
                "keys": "x".join(map(str, keys)),
                "queries": "x".join(map(str, queries)),
                "cutoff": cutoff,
                "heads": heads,
                "numbers": kind,
                "pairs_millions": ours.pairs / 1e6,
                "error": ours.check(kind),
            }
            theirs = (math.nan, math.nan)
            if with_peer:
                theirs = Peer(ours, keys, queries, cutoff, heads).measure()
            passes = zip(("forward", "backward"), (4, 10), ours.measure(), theirs, ours.least_bytes(), strict=True)
            for name, factor, mine, other, least in passes:
                flops = factor * CHANNELS * ours.pairs
                result |= {
                    f"{name} ms": mine,
                    f"{name} peer": other,
                    f"{name} ratio": other / mine,
                    f"{name} %bandwidth": 100.0 * least / (mine * bandwidth),
                    f"{name} %product": 100.0 * flops / (mine * peak),
                    f"{name} times floor": mine / max(least / bandwidth, flops / peak),
                }
            yield result


def main(numbers: list[int] | None, kinds: list[str] | None, with_peer: bool, csv_path: Path | None) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda needs a CUDA device, and PyTorch finds none here")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; CUDA {torch.version.cuda}")
    results = []
    for result in rows(numbers or list(range(1, len(ROWS) + 1)), kinds or list(NUMBERS), with_peer):
        if not results:
            print("| " + " | ".join(result) + " |\n|" + "---|" * len(result))
        results.append(result)
        cells = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in result.values())
        print("| " + " | ".join(cells) + " |", flush=True)
    if csv_path:
        with csv_path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(results[0]))
            writer.writeheader()
            writer.writerows(results)
