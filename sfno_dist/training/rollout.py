"""A model applied again and again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sfno_dist.data.recipe import Recipe


def one_step(model: nn.Module, recipe: Recipe, state: Tensor, features: Tensor) -> Tensor:
    """The normalised fields one step later, from normalised ones   [B, V, nlat, nlon]

    ``state`` [B, V or fewer, nlat, nlon] begins with the prognostic variables, to which the model adds their change;
    diagnostic ones it makes anew.
    """
    carried = state[:, : recipe.state_channels]
    out = model(torch.cat([carried, features], dim=1))
    if not recipe.roles.diagnostic:
        return carried + out
    return torch.cat([carried + out[:, : recipe.state_channels], out[:, recipe.state_channels :]], dim=1)


def rollout(
    model: nn.Module, recipe: Recipe, start: Tensor, features: Tensor, *, known: Tensor | None = None
) -> Tensor:
    """The normalised fields of T steps from ``start`` [B, V, nlat, nlon]   [B, T, V, nlat, nlon]

    ``features`` [B, T, F, nlat, nlon]; where ``known`` [B, V, nlat, nlon] does not hold, each step starts from what
    ``start`` has there, as a forecast does.
    """
    state, states = start, []
    for step in range(features.shape[1]):
        states.append(one_step(model, recipe, state, features[:, step]))
        state = states[-1] if known is None else torch.where(known, states[-1], start)
    return torch.stack(states, dim=1)
