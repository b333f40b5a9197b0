"""Attention of a tile's queries over keys that other tiles hold: which windows of them come here, and how.

``q`` [B, N, Hq, Wq, D], ``k`` [B, N, Hk, Wk, D] and ``v`` [B, N, Hk, Wk, Dv] are the tile's own;
y [B, N, Hq, Wq, Dv] is the tile of what one process would get.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
        #: windows of what comes from other tiles, and where their points lie in it
        self.beyond: list[tuple[Window, slice]] = []
        start = 0
        for first, count in reach.spans:
            spans = tuple(first.tolist()), tuple(count.tolist())
            points = slice(start, start + sum(spans[1]))
            rows = 0, neighbourhood.grid_in.nlat
            self.beyond.append((_window(neighbourhood, keys, queries, rows=rows, spans=spans), points))
            start = points.stop

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, backend: str | None) -> Tensor:
        q, k, v = (as_autocast(x) for x in (q, k, v))
        return _WithHalo.apply(q, _packed(k), _packed(v), self, resolve_backend(backend, q.device))


class _WithHalo(torch.autograd.Function):
    """Attention over the tile's own keys and those of the halo, which is kept for backward."""

    @staticmethod
    def forward(ctx: Any, q, k, v, halo: HaloAttention, backend: str) -> Tensor:
        arriving = halo.gather.start([k, v])
        parts = [_attended(q, (k, v), halo.own, backend)]
        gathered = arriving.finish()
        for window, points in halo.beyond:
            if points.stop > points.start:
                parts.append(_attended(q, [x[:, points] for x in gathered], window, backend))
        y, lse = merge(parts)
        y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, lse, *gathered)
        ctx.settings = halo, backend
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, y, lse, *gathered = ctx.saved_tensors
        halo, backend = ctx.settings
        gradients = _Gradients(dy, q, (y, lse), backend, ctx.needs_input_grad)
        beyond = [gradients.of([x[:, points] for x in gathered], window) for window, points in halo.beyond]
        if not gradients.needs_sent:
            gradients.of((k, v), halo.own)
            return *gradients.of_inputs([]), None, None
        returning = halo.gather.start_home([torch.cat(parts, 1) for parts in zip(*beyond, strict=True)])
        return *gradients.of_inputs(returning.finish(gradients.of((k, v), halo.own))), None, None


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

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, backend: str | None) -> Tensor:
        q, k, v = (as_autocast(x) for x in (q, k, v))
        k, v = _packed(k), _packed(v)
        if self.latitudes is not None:
            k, v = self.latitudes([k, v])
        return _AroundTheRing.apply(q, k, v, self.ring, self.windows, resolve_backend(backend, q.device))


class _AroundTheRing(torch.autograd.Function):
    """Attention over all chunks of a ring. Keeps its own chunk for backward, which sends all around once more."""

    @staticmethod
    def forward(ctx: Any, q, k, v, ring: Ring, windows: list[Window], backend: str) -> Tensor:
        result: list[tuple[Tensor, Tensor]] = []
        for owner, chunk in ring.around([k, v]):
            result = [merge([*result, _attended(q, chunk, windows[owner], backend)])]
        y, lse = result[0][0].to(q.dtype), result[0][1]
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.settings = ring, windows, backend
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, *result = ctx.saved_tensors
        ring, windows, backend = ctx.settings
        gradients = _Gradients(dy, q, tuple(result), backend, ctx.needs_input_grad)
        sums = ring.around_with_sums([k, v], lambda owner, chunk: gradients.of(chunk, windows[owner]))
        return *gradients.of_inputs(sums), None, None, None


class _Gradients:
    """Gradients of attention whose keys come in parts: dq adds up here, dk and dv go back to where the keys are from.

    ``result`` is (y, lse) over all keys; ``needs`` says which of q, k and v need a gradient.
    """

    def __init__(
        self, dy: Tensor, q: Tensor, result: tuple[Tensor, Tensor], backend: str, needs: tuple[bool, ...]
    ) -> None:
        self.dy, self.q, self.result, self.backend = dy, q, result, backend
        self.needs_dq, *self.needs = needs[:3]
        self.dq = torch.zeros_like(q, dtype=result[1].dtype) if self.needs_dq else None

    @property
    def needs_sent(self) -> bool:
        return any(self.needs)

    def of(self, keys_and_values: Sequence[Tensor], window: Window) -> list[Tensor]:
        """dk and dv [B, P, N*D] of the keys in one window, those that are needed."""
        k, v = (_unpacked(x, self.q.shape[1]) for x in keys_and_values)
        needs = self.needs_dq, self.needs_sent
        dq, *rest = attend_backward(self.dy, self.result, (self.q, k, v), window, backend=self.backend, needs=needs)
        if self.dq is not None:
            self.dq.add_(dq)
        return [x.movedim(1, 2).flatten(2) for x, needed in zip(rest, self.needs, strict=True) if needed]

    def of_inputs(self, sums: Sequence[Tensor]) -> list[Tensor | None]:
        """dq, dk and dv, None for those that are not needed, where ``sums`` are those of dk and dv that are."""
        rest = iter(sums)
        dq = None if self.dq is None else self.dq.to(self.q.dtype)
        return [dq, *(next(rest) if needed else None for needed in self.needs)]


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


def _attended(q: Tensor, keys_and_values: Sequence[Tensor], window: Window, backend: str) -> tuple[Tensor, Tensor]:
    """y and lse of the queries over packed keys and values [B, P, N*D] of one window."""
    k, v = (_unpacked(x, q.shape[1]) for x in keys_and_values)
    return attend(q, k, v, window, backend=backend)
