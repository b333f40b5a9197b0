"""What training makes small: errors weighed by area, by variable and by level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sfno_dist.comm import sum_over_globe
from sfno_dist.data.names import level_of
from sfno_dist.mesh import ProcessMesh

#: of a point's normalised error; a spectral loss would need spherical transforms, which this package has not
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mse": torch.square,
    "l1": torch.abs,
    "huber": lambda error: functional.huber_loss(error, torch.zeros_like(error), reduction="none"),  # delta 1
}


@dataclass(frozen=True)
class Objective:
    """Which loss each variable has and what it counts beside the others.

    Args:
        loss: ``mse``, ``l1`` or ``huber`` (of normalised errors, square up to 1), of the variables not in ``loss_of``.
        loss_of: other losses by variable. A name without its level, such as ``z``, stands for all levels of it.
        weights: of variables, likewise by name with or without level; 1 for the others.
        level_weights: of pressure levels in hPa, times the variable's own; 1 for the others and at the surface.

    ``ValueError`` for names, levels and losses that there are not.
    """

    loss: str = "mse"
    loss_of: Mapping[str, str] | None = None
    weights: Mapping[str, float] | None = None
    level_weights: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        for name in (self.loss, *(self.loss_of or {}).values()):
            if name not in LOSSES:
                raise ValueError(f"unknown loss {name!r} in optim.objective; choose among {', '.join(LOSSES)}")
        for weight in (*(self.weights or {}).values(), *(self.level_weights or {}).values()):
            if not isinstance(weight, (int, float)) or not 0.0 <= weight < float("inf"):
                raise ValueError(f"weights in optim.objective are numbers of at least 0, got {weight!r}")

    def losses_of(self, variables: Sequence[str]) -> tuple[str, ...]:
        """The loss of each variable."""
        return tuple(map(str, self._chosen("loss_of", variables, self.loss)))

    def weights_of(self, variables: Sequence[str]) -> Tensor:
        """What each variable counts in the mean over all of them   [V], of mean 1"""
        weights = torch.tensor(self._chosen("weights", variables, 1.0), dtype=torch.float64)
        given = self.level_weights or {}
        levels = [None if (split := level_of(name)) is None else split[1] for name in variables]
        unread = set(given) - set(levels)
        if unread:
            held = ", ".join(str(level) for level in sorted(set(levels) - {None}, key=str)) or "none"
            raise ValueError(f"optim.objective.level_weights names {sorted(unread)} hPa; the variables have {held}")
        weights *= torch.tensor([1.0 if x is None else given.get(x, 1.0) for x in levels], dtype=torch.float64)
        if not weights.sum() > 0:
            raise ValueError("optim.objective gives every variable the weight 0")
        return weights / weights.mean()

    def _chosen(self, setting: str, variables: Sequence[str], default: object) -> list:
        """What a mapping by name says of each variable: by its whole name, else by that without the level."""
        given: Mapping = getattr(self, setting) or {}
        bases = {name: split[0] for name in variables if (split := level_of(name))}
        unread = [name for name in given if name not in variables and name not in bases.values()]
        if unread:
            raise ValueError(
                f"optim.objective.{setting} names {', '.join(map(str, unread))}; the variables are "
                f"{', '.join(variables)}"
            )
        return [given.get(name, given.get(bases.get(name), default)) for name in variables]


def area_means(
    prediction: Tensor,
    target: Tensor,
    shares: Tensor,
    *,
    losses: Sequence[str] = ("mse",),
    valid: Tensor | None = None,
    mesh: ProcessMesh | None = None,
) -> Tensor:
    """sum over points of share x loss of the error: fields [B, ..., V, nlat, nlon] -> [B, ..., V].

    A sum over points with weights that add up to 1 over the globe: tiles of it add up to the whole.

    Args:
        losses: of each variable, or one of all.
        valid: bool, as the fields: the mean is over the points where it holds, of the whole globe of ``mesh``; a field
            without any counts as 0.
    """
    error = prediction - target
    if valid is not None:
        shares = shares * valid
        # Masked before it is squared: a NaN there would come back as the gradient.
        error = torch.where(valid, error, 0.0)
    if len(set(losses)) == 1:
        points = LOSSES[losses[0]](error)
    else:
        points = torch.stack([LOSSES[name](error[..., v, :, :]) for v, name in enumerate(losses)], dim=-3)
    means = (points * shares).sum((-2, -1))
    if valid is None:
        return means
    area = shares.sum((-2, -1))
    area = area if mesh is None else sum_over_globe(area, mesh)
    return means / area.clamp_min(torch.finfo(area.dtype).tiny)


def mean_loss(means: Tensor, weights: Tensor, weight: Tensor) -> Tensor:
    """Mean over samples, lead times and variables of ``means`` [B, T, V]: ``weights`` [V] have mean 1.

    ``weight`` [B] is what each sample counts, see ``sfno_dist.data.sampler.Draw``.
    """
    return ((means * weights).mean((1, 2)) * weight).mean()
