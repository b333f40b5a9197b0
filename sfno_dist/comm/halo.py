"""The halo exchange: points of other tiles gathered by plan, and its adjoint, which returns gradients and adds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sfno_dist.comm.plan import Plan
from sfno_dist.comm.wire import Flight
from sfno_dist.mesh import ProcessMesh

Fields = tuple[Tensor, ...]


class Transit:
    """One exchange under way: its messages, and in backward those with the gradients."""

    def __init__(self, mesh: ProcessMesh, plan: Plan, fields: Sequence[Tensor]) -> None:
        self.mesh, self.plan = mesh, plan
        self.widths = [field.shape[-1] for field in fields]
        self.needs = [field.requires_grad and torch.is_grad_enabled() for field in fields]
        # (messages, what they fill, what this tile gives itself); only between the halves of either pass
        self.arriving: tuple[Flight, list[Tensor], list[Tensor]] | None = None
        self.returning: tuple[Flight, list[Tensor], Tensor] | None = None


class Gather:
    """Fields [B, points of this tile, C] -> fields [B, points of the plan, C], in two halves.

    Between ``start`` and ``finish`` the messages are on their way: work there costs no time. Backward runs the halves
    the other way round, so that the same work's gradient overlaps with the gradients' way home.
    """

    def __init__(self, mesh: ProcessMesh, plan: Plan) -> None:
        self.mesh, self.plan = mesh, plan

    def start(self, fields: Sequence[Tensor]) -> tuple[Fields, tuple[Transit, Tensor]]:
        """The fields, to go on with in place of what was given, and the exchange under way."""
        transit = Transit(self.mesh, self.plan.on(fields[0].device), fields)
        *own, token = _Start.apply(transit, *fields)
        return tuple(own), (transit, token)

    def finish(self, under_way: tuple[Transit, Tensor]) -> Fields:
        """What was gathered, one for each field; columns of a run that no arc touches are 0."""
        return _Finish.apply(*under_way)

    def __call__(self, fields: Sequence[Tensor]) -> Fields:
        return self.finish(self.start(fields)[1])


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transit: Transit, *fields: Tensor) -> Any:
        plan, first = transit.plan, fields[0]
        sends = [(p, torch.cat([x.index_select(1, index) for x in fields], -1)) for p, index in plan.sends]
        width = sum(transit.widths)
        arrivals = [first.new_empty(len(first), len(positions), width) for _, positions in plan.receives]
        receives = [(place, x) for (place, _), x in zip(plan.receives, arrivals, strict=True)]
        local = [x.index_select(1, plan.local[0]) for x in fields]
        transit.arriving = Flight(transit.mesh, sends, receives), arrivals, local
        ctx.transit, own = transit, [x.view_as(x) for x in fields]
        ctx.mark_non_differentiable(*(x for x, needed in zip(own, transit.needs, strict=True) if not needed))
        return (*own, first.new_zeros(0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        transit, needs = ctx.transit, ctx.transit.needs
        if transit.returning is None:  # nothing of what was gathered here was used, but others wait
            own = [x for x, needed in zip(gradients, needs, strict=False) if needed]
            points = transit.plan.points
            _send_home(transit, [x.new_zeros(len(x), points, x.shape[-1]) for x in own])
        flight, arrivals, local = transit.returning
        transit.returning = None
        flight.wait()
        sums: list[Tensor | None] = [None] * len(needs)
        offset = 0
        for place, needed in enumerate(needs):
            if needed:
                width = transit.widths[place]
                parts = [x[..., offset : offset + width] for x in arrivals]
                sums[place] = _added(gradients[place], transit.plan, [*parts, local[..., offset : offset + width]])
                offset += width
        return None, *sums


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transit: Transit, token: Tensor) -> Any:
        ctx.transit = transit
        assert transit.arriving is not None, "an exchange is finished once"
        flight, arrivals, local = transit.arriving
        transit.arriving = None
        flight.wait()
        plan, offset, gathered = transit.plan, 0, []
        # Runs may hold columns that no arc touches.
        full = plan.received + len(plan.local[1]) == plan.points
        for width, own in zip(transit.widths, local, strict=True):
            shape = (len(own), plan.points, width)
            result = own.new_empty(shape) if full else own.new_zeros(shape)
            result.index_copy_(1, plan.local[1], own)
            for (_, positions), arrival in zip(plan.receives, arrivals, strict=True):
                result.index_copy_(1, positions, arrival[..., offset : offset + width])
            gathered.append(result)
            offset += width
        ctx.mark_non_differentiable(*(x for x, needed in zip(gathered, transit.needs, strict=True) if not needed))
        return tuple(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        transit = ctx.transit
        _send_home(transit, [x for x, needed in zip(gradients, transit.needs, strict=True) if needed])
        return None, gradients[0].new_zeros(0)


def _send_home(transit: Transit, gradients: list[Tensor]) -> None:
    """Sends gradients [B, points, C] of what was gathered to the owners; only of fields that need one."""
    plan, first = transit.plan, gradients[0]
    packed = torch.cat(gradients, -1)
    sends = [(place, packed.index_select(1, positions)) for place, positions in plan.receives]
    arrivals = [first.new_empty(len(first), len(index), packed.shape[-1]) for _, index in plan.sends]
    receives = [(place, x) for (place, _), x in zip(plan.sends, arrivals, strict=True)]
    transit.returning = Flight(transit.mesh, sends, receives), arrivals, packed.index_select(1, plan.local[1])


def _added(gradient: Tensor, plan: Plan, parts: list[Tensor]) -> Tensor:
    """The tile's own gradient and what came from others, added in at least float32."""
    indices = [*(index for _, index in plan.sends), plan.local[0]]
    wide = torch.promote_types(gradient.dtype, torch.float32)
    total = gradient.to(wide, copy=True)
    for index, part in zip(indices, parts, strict=True):
        total.index_add_(1, index, part.to(wide))
    return total.to(gradient.dtype)
