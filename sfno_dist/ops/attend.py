"""``attend``: spherical attention on a window of the globe, as one torch.library op with its gradient.

s_ij = q_i . k_j       lse_i = log sum_j w_j exp(s_ij)       y_i = sum_j w_j exp(s_ij - lse_i) v_j

Dims: B batch, N heads, H rows, W columns, P key points, D channels of query and key, Dv channels of value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sfno_dist.geometry import Neighbourhood
from sfno_dist.ops import compiled, compiled_cuda, reference, schedule

#: name -> module with ``forward`` and ``backward``; a device's compiled kernels bear its name
BACKENDS = {"reference": reference, "cpu": compiled, "cuda": compiled_cuda}


@dataclass(frozen=True)
class Window:
    """The part of the globe that local queries and keys stand for; all rows and columns are global.

    Queries are rows ``query_rows`` and columns ``query_columns`` (start, stop). The local keys are the rows
    ``key_rows`` (start, stop); row h of them holds ``key_counts[h]`` columns from ``key_first[h]`` eastward,
    passing the end of the row where needed.
    """

    neighbourhood: Neighbourhood
    query_rows: tuple[int, int]
    query_columns: tuple[int, int]
    key_rows: tuple[int, int]
    key_first: tuple[int, ...]
    key_counts: tuple[int, ...]

    @classmethod
    def whole(cls, neighbourhood: Neighbourhood) -> Window:
        """The window of one process: everything."""
        (nlat_in, nlon_in), (nlat_out, nlon_out) = neighbourhood.grid_in.shape, neighbourhood.grid_out.shape
        return cls(neighbourhood, (0, nlat_out), (0, nlon_out), (0, nlat_in), (0,) * nlat_in, (nlon_in,) * nlat_in)

    @torch.compiler.assume_constant_result  # a traced graph holds the tables and need not see how they are made
    def tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """half_widths [Hq, Hk] int32, key_weights [Hk] float64, key_rows [Hk, 3] int64 (first, count, place in P)."""
        return _tables(self, device)

    @torch.compiler.assume_constant_result
    def schedule(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """Tiles of the queries and of the keys [T, 9] int32, and how many of either are parts; see ``ops.schedule``."""
        return _schedule(self, device)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """``ValueError``, one line that says what differs, for tensors that do not fill the window."""
        if q.ndim != 5 or k.ndim != 4 or v.ndim != 4:
            raise ValueError(
                f"attend takes q [B, N, Hq, Wq, D], k [B, N, P, D] and v [B, N, P, Dv], got shapes "
                f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
            )
        rows = self.query_rows[1] - self.query_rows[0]
        columns = self.query_columns[1] - self.query_columns[0]
        points = sum(self.key_counts)
        for name, got, expected in (
            ("q", q.shape, (q.shape[0], q.shape[1], rows, columns, q.shape[4])),
            ("k", k.shape, (q.shape[0], q.shape[1], points, q.shape[4])),
            ("v", v.shape, (q.shape[0], q.shape[1], points, v.shape[3])),
        ):
            if tuple(got) != expected:
                raise ValueError(
                    f"{name} has shape {list(got)}, but the grids and the other inputs ask for {list(expected)}"
                )
        if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
            raise ValueError(
                f"q, k and v must share one dtype and device, got {q.dtype} on {q.device}, {k.dtype} on {k.device}, "
                f"{v.dtype} on {v.device}"
            )
        if not q.dtype.is_floating_point:
            raise ValueError(f"attend takes floating-point inputs, got {q.dtype}")


@lru_cache(maxsize=256)
def _tables(window: Window, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    rows_out, rows_in = slice(*window.query_rows), slice(*window.key_rows)
    counts = np.asarray(window.key_counts, dtype=np.int64)
    key_rows = np.stack([np.asarray(window.key_first, dtype=np.int64), counts, np.cumsum(counts) - counts], axis=1)
    arrays = (
        window.neighbourhood.half_widths[rows_out, rows_in],
        window.neighbourhood.grid_in.cell_areas[rows_in],
        key_rows,
    )
    # Tables first made for a forecast serve training too, which cannot save inference tensors.
    with torch.inference_mode(False):
        half_widths, key_weights, rows = (torch.from_numpy(array.copy()).to(device) for array in arrays)
    return half_widths, key_weights, rows


@lru_cache(maxsize=256)
def _schedule(window: Window, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    neighbourhood = window.neighbourhood
    columns = window.query_columns[1] - window.query_columns[0]
    rows = window.query_rows[1] - window.query_rows[0]
    nlon_out, nlon_in = neighbourhood.grid_out.nlon, neighbourhood.grid_in.nlon
    first = np.full(rows, window.query_columns[0] % nlon_out)
    queries = schedule.Rows(first, np.full(rows, columns), nlon_out)
    keys = schedule.Rows(np.asarray(window.key_first), np.asarray(window.key_counts), nlon_in)
    half_widths = neighbourhood.half_widths[slice(*window.query_rows), slice(*window.key_rows)]
    of_queries, query_splits = schedule.tiles(half_widths, queries, keys)
    of_keys, key_splits = schedule.tiles(half_widths.T, keys, queries)
    with torch.inference_mode(False):
        query_tiles, key_tiles = (torch.from_numpy(tiles).to(device) for tiles in (of_queries, of_keys))
    return query_tiles, key_tiles, query_splits, key_splits


def attend(q: Tensor, k: Tensor, v: Tensor, window: Window, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Spherical attention of scaled queries ``q`` [B, N, Hq, Wq, D] over ``k`` [B, N, P, D], ``v`` [B, N, P, Dv].

    P counts the key columns of the window, row after row: nlat_in * nlon_in for ``Window.whole``. Returns
    y [B, N, Hq, Wq, Dv] and lse [B, N, Hq, Wq]; partial results over disjoint key sets merge from the two, and a
    query without keys in the window has y = 0 and lse = -inf. ``backend`` as in ``resolve_backend``.
    """
    q, k, v = (as_autocast(x) for x in (q, k, v))
    window.check(q, k, v)
    return torch.ops.sfno_dist.attend(*operands(q, k, v, window, resolve_backend(backend, q.device)))


def attend_backward(
    dy: Tensor,
    result: tuple[Tensor, Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    window: Window,
    *,
    backend: str | None = None,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv from ``dy``, where ``result`` is (y, lse) over all keys and k, v those of one window.

    What the windows of disjoint key sets give adds up to the gradients over all keys. ``needs``: dq; dk and dv. A
    gradient that is not needed is an empty tensor.
    """
    q, k, v = qkv
    _, _, _, *settings = operands(q, k, v, window, resolve_backend(backend, q.device))
    return torch.ops.sfno_dist.attend_backward(dy, None, q, k, v, *result, *settings, *needs)


def as_autocast(x: Tensor) -> Tensor:
    """``x`` in the dtype that autocast computes in, where it is on; float64 stays."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


def operands(q: Tensor, k: Tensor, v: Tensor, window: Window, backend: str) -> tuple:
    """The arguments of the op: tensors and numbers only, as torch.library asks."""
    nlon_out, nlon_in = window.neighbourhood.grid_out.nlon, window.neighbourhood.grid_in.nlon
    numbers = nlon_out, nlon_in, window.query_columns[0]
    if backend == "cuda":
        return q, k, v, *window.tables(q.device), *numbers, backend, *window.schedule(q.device)
    return q, k, v, *window.tables(q.device), *numbers, backend, None, None, 0, 0


def resolve_backend(backend: str | None, device: torch.device) -> str:
    """The name of the implementation for tensors on ``device``: its compiled kernels unless one is named.

    ``ValueError`` for a name that does not exist or a device without kernels; nothing falls back to another.
    """
    if backend is None:
        if device.type not in BACKENDS:
            raise ValueError(
                f"there are no compiled kernels for {device.type} devices yet: work on the CPU "
                f"(trainer.accelerator=cpu) or choose backend='reference' (model.backend=reference) for small grids"
            )
        return device.type
    if backend not in BACKENDS:
        raise ValueError(
            f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}, or None for the device's own"
        )
    return backend


_TABLES = (
    "Tensor half_widths, Tensor key_weights, Tensor key_rows, int nlon_out, int nlon_in, int first_column, "
    "str backend, Tensor? query_tiles, Tensor? key_tiles, int query_splits, int key_splits"
)
# Defined by schema: torch.library.custom_op would import the compiler, seconds long, at the first call.
torch.library.define("sfno_dist::attend", f"(Tensor q, Tensor k, Tensor v, {_TABLES}) -> (Tensor, Tensor)")
torch.library.define(
    "sfno_dist::attend_backward",
    f"(Tensor dy, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, {_TABLES}, "
    "bool needs_dq, bool needs_dkv) -> (Tensor, Tensor, Tensor)",
)


def _backend_arguments(rest: Sequence) -> tuple:
    """(module, its arguments after the inputs) from the op's: the schedule is for the CUDA kernels alone."""
    *tables, backend, query_tiles, key_tiles, query_splits, key_splits = rest
    tiles = (query_tiles, key_tiles, query_splits, key_splits) if backend == "cuda" else ()
    return BACKENDS[backend], (*tables, *tiles)


@torch.library.impl("sfno_dist::attend", "default")
def _attend(q, k, v, *rest):
    module, arguments = _backend_arguments(rest)
    y, lse = module.forward(q, k, v, *arguments)
    return channels_last(y), lse


@torch.library.impl("sfno_dist::attend_backward", "default")
def _attend_backward(dy, dlse, q, k, v, y, lse, *rest_and_needs):
    *rest, needs_dq, needs_dkv = rest_and_needs
    module, arguments = _backend_arguments(rest)
    gradients = module.backward(dy, dlse, q, k, v, y, lse, *arguments, needs_dq, needs_dkv)
    # An op returns tensors only: an empty one stands for a gradient that nobody needs.
    return tuple(q.new_empty(0) if gradient is None else channels_last(gradient) for gradient in gradients)


def channels_last(x: Tensor) -> Tensor:
    """[B, N, ..., D] laid out in memory as [B, ..., N, D], as the layers' linear maps read and write it."""
    return x.movedim(1, -2).contiguous().movedim(-2, 1)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, half_widths, key_weights, key_rows, *numbers, query_tiles, key_tiles, query_splits, key_splits = inputs
    ctx.numbers, ctx.splits = numbers, (query_splits, key_splits)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, half_widths, key_weights, key_rows, query_tiles, key_tiles)


def _gradient(ctx, dy: Tensor | None, dlse: Tensor | None):
    q, k, v, y, lse, *tables, query_tiles, key_tiles = ctx.saved_tensors
    rest = *tables, *ctx.numbers, query_tiles, key_tiles, *ctx.splits
    needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
    dy = torch.zeros_like(y) if dy is None else dy
    dq, dk, dv = torch.ops.sfno_dist.attend_backward(dy, dlse, q, k, v, y, lse, *rest, needs_dq, needs_dk or needs_dv)
    return (dq if needs_dq else None, dk if needs_dk else None, dv if needs_dv else None) + (None,) * len(rest)


def _refuse_second_gradient(ctx, *gradients):
    raise NotImplementedError(
        "spherical attention has no second derivative; use backend='reference' outside the op "
        "(sfno_dist.ops.reference.forward is plain PyTorch) if you need one"
    )


@torch.library.register_fake("sfno_dist::attend")
def _(q, k, v, *tables):
    y = channels_last(q.new_empty(*q.shape[:-1], v.shape[-1]))
    return y, q.new_empty(q.shape[:-1], dtype=reference.accumulation_dtype(q.dtype))


@torch.library.register_fake("sfno_dist::attend_backward")
def _(dy, dlse, q, k, v, y, lse, *tables_and_needs):
    needs_dq, needs_dkv = tables_and_needs[-2:]
    nothing = (0,)
    dq = channels_last(torch.empty_like(q)) if needs_dq else q.new_empty(nothing)
    if not needs_dkv:
        return dq, q.new_empty(nothing), q.new_empty(nothing)
    return dq, channels_last(torch.empty_like(k)), channels_last(torch.empty_like(v))


torch.library.register_autograd("sfno_dist::attend", _gradient, setup_context=_setup_context)
torch.library.register_autograd(
    "sfno_dist::attend_backward", _refuse_second_gradient, setup_context=lambda ctx, inputs, output: None
)


def _into_batch(size: int, tensors: Sequence[Tensor | None], dims: Sequence[int | None]) -> list[Tensor | None]:
    """The dim that vmap maps over, folded into B; a tensor without it is the same for all of them."""
    moved = (
        None if x is None else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, dims, strict=True)
    )
    return [None if x is None else x.flatten(0, 1) for x in moved]


@torch.library.register_vmap("sfno_dist::attend")
def _(info, in_dims, q, k, v, *rest):
    folded = _into_batch(info.batch_size, (q, k, v), in_dims[:3])
    results = torch.ops.sfno_dist.attend(*folded, *rest)
    return tuple(x.unflatten(0, (info.batch_size, len(x) // info.batch_size)) for x in results), (0, 0)


@torch.library.register_vmap("sfno_dist::attend_backward")
def _(info, in_dims, dy, dlse, q, k, v, y, lse, *rest):
    folded = _into_batch(info.batch_size, (dy, dlse, q, k, v, y, lse), in_dims[:7])
    results = torch.ops.sfno_dist.attend_backward(*folded, *rest)
    needed = rest[-2], rest[-1], rest[-1]
    split = (
        x.unflatten(0, (info.batch_size, len(x) // info.batch_size)) if n else x
        for x, n in zip(results, needed, strict=True)
    )
    return tuple(split), tuple(0 if n else None for n in needed)
