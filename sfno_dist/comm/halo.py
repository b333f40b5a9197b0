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


class Gather:
    """Fields [B, points of this tile, C] -> fields [B, points of the plan, C].

    Either way has two halves: work between ``start`` and ``finish`` of what it returns costs no time, because the
    messages are on their way meanwhile. Called, it is both halves at once, with the adjoint as its gradient.
    """

    def __init__(self, mesh: ProcessMesh, plan: Plan) -> None:
        self.mesh, self.plan = mesh, plan

    def __call__(self, fields: Sequence[Tensor]) -> Fields:
        return _Gather.apply(self, *fields)

    def start(self, fields: Sequence[Tensor]) -> Arriving:
        return Arriving(self.mesh, self.plan.on(fields[0].device), fields)

    def start_home(self, gradients: Sequence[Tensor]) -> Returning:
        """Sends gradients [B, points of the plan, C] to the owners of the points."""
        return Returning(self.mesh, self.plan.on(gradients[0].device), gradients)


class Arriving:
    """Fields on their way from their owners."""

    def __init__(self, mesh: ProcessMesh, plan: Plan, fields: Sequence[Tensor]) -> None:
        self.plan, first = plan, fields[0]
        self.widths = [field.shape[-1] for field in fields]
        sends = [(place, torch.cat([x.index_select(1, index) for x in fields], -1)) for place, index in plan.sends]
        self.received = [first.new_empty(len(first), len(p), sum(self.widths)) for _, p in plan.receives]
        receives = [(place, x) for (place, _), x in zip(plan.receives, self.received, strict=True)]
        self.flight = Flight(mesh, sends, receives)
        self.local = [x.index_select(1, plan.local[0]) for x in fields]

    def finish(self) -> Fields:
        """What was gathered, one for each field; columns of a run that no arc touches are 0."""
        self.flight.wait()
        plan, gathered = self.plan, []
        full = plan.received + len(plan.local[1]) == plan.points
        arrivals = [x.split(self.widths, -1) for x in self.received]
        for number, (width, own) in enumerate(zip(self.widths, self.local, strict=True)):
            shape = (len(own), plan.points, width)
            result = own.new_empty(shape) if full else own.new_zeros(shape)
            result.index_copy_(1, plan.local[1], own)
            for (_, positions), parts in zip(plan.receives, arrivals, strict=True):
                result.index_copy_(1, positions, parts[number])
            gathered.append(result)
        return tuple(gathered)


class Returning:
    """Gradients on their way home to the owners of the points."""

    def __init__(self, mesh: ProcessMesh, plan: Plan, gradients: Sequence[Tensor]) -> None:
        self.plan = plan
        self.widths = [gradient.shape[-1] for gradient in gradients]
        packed = torch.cat(list(gradients), -1)
        sends = [(place, packed.index_select(1, positions)) for place, positions in plan.receives]
        self.received = [packed.new_empty(len(packed), len(index), packed.shape[-1]) for _, index in plan.sends]
        receives = [(place, x) for (place, _), x in zip(plan.sends, self.received, strict=True)]
        self.flight = Flight(mesh, sends, receives)
        self.local = packed.index_select(1, plan.local[1])

    def finish(self, own: Sequence[Tensor]) -> Fields:
        """``own`` gradients [B, points of this tile, C] and what came from others, added in at least float32."""
        self.flight.wait()
        indices = [*(index for _, index in self.plan.sends), self.plan.local[0]]
        arrivals = [x.split(self.widths, -1) for x in (*self.received, self.local)]
        sums = []
        for number, gradient in enumerate(own):
            wide = torch.promote_types(gradient.dtype, torch.float32)
            total = gradient.to(wide, copy=True)
            for index, parts in zip(indices, arrivals, strict=True):
                total.index_add_(1, index, parts[number].to(wide))
            sums.append(total.to(gradient.dtype))
        return tuple(sums)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gather: Gather, *fields: Tensor) -> Fields:
        ctx.gather, ctx.points = gather, fields[0].shape[1]
        gathered, needs = gather.start(fields).finish(), ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(x for x, needed in zip(gathered, needs, strict=True) if not needed))
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needs = ctx.needs_input_grad[1:]
        returned = [x for x, needed in zip(gradients, needs, strict=True) if needed]
        nothing = [x.new_zeros(len(x), ctx.points, x.shape[-1]) for x in returned]
        sums = iter(ctx.gather.start_home(returned).finish(nothing))
        return None, *(next(sums) if needed else None for needed in needs)
