"""Attention of a tile's queries over keys that other tiles hold: which windows of them come here, and how.

``q`` [B, N, Hq, Wq, D], ``k`` [B, N, Hk, Wk, D] and ``v`` [B, N, Hk, Wk, Dv] are the tile's own;
y [B, N, Hq, Wq, Dv] is the tile of what one process would get.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sfno_dist.comm import Gather, Reach, Ring, halo_plan, latitude_plan
from sfno_dist.geometry import Neighbourhood
from sfno_dist.mesh import Decomposition
from sfno_dist.ops import Window, attend, merge
from sfno_dist.ops.attend import as_autocast, attend_backward, resolve_backend


class WholeGlobe:
    """All keys are here: nothing to exchange."""

    def __init__(self, neighbourhood: Neighbourhood, keys: Decomposition, queries: Decomposition) -> None:
        self.window = Window.whole(neighbourhood)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, backend: str | None) -> Tensor:
        return attend(q, k.flatten(2, 3), v.flatten(2, 3), self.window, backend=backend)[0]


class HaloAttention:
    """Just the columns that the tile's arcs touch beyond it come here; its own keys are worked on meanwhile."""

    def __init__(self, neighbourhood: Neighbourhood, keys: Decomposition, queries: Decomposition) -> None:
        reach = Reach(neighbourhood, keys, queries)
        self.gather = Gather(keys.mesh, halo_plan(reach))
        self.own = _window(neighbourhood, keys, queries)
        self.beyond = [
            _window(neighbourhood, keys, queries, rows=(0, neighbourhood.grid_in.nlat), spans=(tuple(f), tuple(n)))
            for f, n in (np.stack(spans).tolist() for spans in reach.spans)
        ]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, backend: str | None) -> Tensor:
        q, k, v = (as_autocast(x) for x in (q, k, v))
        heads = k.shape[1]
        (k, v), under_way = self.gather.start([_packed(k), _packed(v)])
        parts = [attend(q, _unpacked(k, heads), _unpacked(v, heads), self.own, backend=backend)]
        k, v = self.gather.finish(under_way)
        start = 0
        for window in self.beyond:
            points = slice(start, start + sum(window.key_counts))
            if points.stop > start:
                keys, values = (_unpacked(x[:, points], heads) for x in (k, v))
                parts.append(attend(q, keys, values, window, backend=backend))
            start = points.stop
        return parts[0][0] if len(parts) == 1 else merge(parts)[0].to(q.dtype)


class RingAttention:
    """The rows within reach come from north and south; then keys and values pass along the azimuth axis in chunks."""

    def __init__(self, neighbourhood: Neighbourhood, keys: Decomposition, queries: Decomposition) -> None:
        mesh, reach = keys.mesh, Reach(neighbourhood, keys, queries)
        rows = reach.rows(mesh.place) if mesh.polar > 1 else (0, neighbourhood.grid_in.nlat)
        self.latitudes = Gather(mesh, latitude_plan(reach)) if mesh.polar > 1 else None
        height = rows[1] - rows[0]
        #: by the azimuth index of the process that the keys belong to
        self.windows = [
            _window(neighbourhood, keys, queries, rows=rows, spans=((start,) * height, (stop - start,) * height))
            for start, stop in zip(keys.column_bounds[:-1], keys.column_bounds[1:], strict=True)
        ]
        self.ring = Ring(mesh, [sum(window.key_counts) for window in self.windows])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, backend: str | None) -> Tensor:
        q, k, v = (as_autocast(x) for x in (q, k, v))
        heads = k.shape[1]
        k, v = _packed(k), _packed(v)
        if self.latitudes is not None:
            k, v = self.latitudes([k, v])
        return _AroundTheRing.apply(q, k, v, heads, self.ring, self.windows, resolve_backend(backend, q.device))


class _AroundTheRing(torch.autograd.Function):
    """Attention over all chunks of a ring. Keeps its own chunk for backward, which sends all around once more."""

    @staticmethod
    def forward(ctx: Any, q, k, v, heads: int, ring: Ring, windows: list[Window], backend: str) -> Tensor:
        result = None
        for owner, chunk in ring.around(torch.cat([k, v], -1)):
            keys, values = (_unpacked(x, heads) for x in chunk.split([k.shape[-1], v.shape[-1]], -1))
            part = attend(q, keys, values, windows[owner], backend=backend)
            result = part if result is None else merge([result, part])
        assert result is not None
        y, lse = result[0].to(q.dtype), result[1]
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.settings = heads, ring, windows, backend
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, *result = ctx.saved_tensors
        heads, ring, windows, backend = ctx.settings
        needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
        needs = needs_dq, needs_dk or needs_dv
        total_dq = torch.zeros_like(q, dtype=result[1].dtype) if needs_dq else None

        def contribution(owner: int, chunk: Tensor) -> Tensor | None:
            keys, values = (_unpacked(x, heads) for x in chunk.split([k.shape[-1], v.shape[-1]], -1))
            dq, dk, dv = attend_backward(
                dy, tuple(result), (q, keys, values), windows[owner], backend=backend, needs=needs
            )
            if total_dq is not None:
                total_dq.add_(dq)
            wanted = [_channels_last(x) for x, needed in ((dk, needs_dk), (dv, needs_dv)) if needed]
            return torch.cat(wanted, -1) if wanted else None

        sums = ring.around_with_sums(torch.cat([k, v], -1), contribution)
        dk = sums[..., : k.shape[-1]] if needs_dk and sums is not None else None
        dv = sums[..., -v.shape[-1] :] if needs_dv and sums is not None else None
        return None if total_dq is None else total_dq.to(q.dtype), dk, dv, None, None, None, None


Exchange = WholeGlobe | HaloAttention | RingAttention
EXCHANGES: dict[str, type[HaloAttention] | type[RingAttention]] = {"halo": HaloAttention, "ring": RingAttention}


def make_exchange(name: str, neighbourhood: Neighbourhood, keys: Decomposition, queries: Decomposition) -> Exchange:
    """The exchange called ``name``, planned for this tile; ``ValueError`` for another name."""
    if name not in EXCHANGES:
        raise ValueError(f"unknown exchange {name!r}; choose one of {', '.join(EXCHANGES)}")
    if keys.mesh.globe_size == 1:
        return WholeGlobe(neighbourhood, keys, queries)
    return EXCHANGES[name](neighbourhood, keys, queries)


def _window(
    neighbourhood: Neighbourhood,
    keys: Decomposition,
    queries: Decomposition,
    *,
    rows: tuple[int, int] | None = None,
    spans: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> Window:
    """This tile's queries and the keys of ``rows`` with ``spans`` (first columns, counts); its own tile by default."""
    height, width = keys.tile_shape
    rows = (keys.rows.start, keys.rows.stop) if rows is None else rows
    spans = ((keys.columns.start,) * height, (width,) * height) if spans is None else spans
    query_rows, query_columns = ((part.start, part.stop) for part in (queries.rows, queries.columns))
    return Window(neighbourhood, query_rows, query_columns, rows, *spans)


def _packed(field: Tensor) -> Tensor:
    """[B, N, H, W, D] -> [B, H*W, N*D]; a view of memory that is channels-last."""
    return field.movedim(1, 3).flatten(3).flatten(1, 2)


def _unpacked(points: Tensor, heads: int) -> Tensor:
    """[B, P, N*D] -> [B, N, P, D], a view."""
    return points.unflatten(-1, (heads, points.shape[-1] // heads)).movedim(2, 1)


def _channels_last(points: Tensor) -> Tensor:
    """[B, N, P, D] -> [B, P, N*D]"""
    return points.movedim(1, 2).flatten(2)
