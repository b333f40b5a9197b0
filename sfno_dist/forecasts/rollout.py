"""One forecast: the model applied step after step, on the tile of this process.

Dims: V variables that come out, H rows and W columns of the tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sfno_dist.data.calendars import as_gregorian, instants
from sfno_dist.data.samples import FieldReader
from sfno_dist.forecasts.ensemble import random_field
from sfno_dist.forecasts.store import Layout
from sfno_dist.forecasts.times import find_time
from sfno_dist.training.checkpoint import LoadedCheckpoint
from sfno_dist.training.rollout import one_step


@dataclass(frozen=True)
class Trajectory:
    """From the data at ``start`` through ``times`` [steps + 1], perturbed by ``perturbation`` spreads."""

    number: int  # among all of the request
    start: int
    times: np.ndarray
    member: int = 0
    perturbation: float = 0.0
    seed: int = 0


class Rollout:
    """The normalised ``state`` [V, H, W] after ``step`` steps of a trajectory; ``advance`` takes the next one.

    Where a variable has no value at the start, it has none later, and the model is given what stood there first.
    """

    def __init__(self, loaded: LoadedCheckpoint, reader: FieldReader, trajectory: Trajectory) -> None:
        """``DataError`` where the data cannot be read."""
        self.loaded, self.reader, self.trajectory = loaded, reader, trajectory
        self.device = next(loaded.model.parameters()).device
        self.dates = as_gregorian(trajectory.times)
        fields = reader(trajectory.start)
        self.normalised, self.valid = loaded.recipe.normalised(fields)
        outputs = loaded.recipe.out_channels
        self.known = torch.from_numpy(self.valid[:outputs])
        self.filling = torch.from_numpy(self.normalised[:outputs])
        self.state, self.step = self.filling, 0
        self.initial: Tensor | None = torch.from_numpy(fields[:outputs])  # exact, of a forecast that is not perturbed
        if trajectory.perturbation > 0.0:
            self._perturb()

    def _perturb(self) -> None:
        """Adds to each prognostic variable a random field, in units of its spread over the training period."""
        recipe, trajectory = self.loaded.recipe, self.trajectory
        instant = int(instants(trajectory.times[:1])[0]) % 2**63
        self.state = self.state.clone()
        for v in range(recipe.state_channels):
            whole = random_field(recipe.grid, (trajectory.seed, instant, trajectory.member, v))
            noise = torch.from_numpy(whole[recipe.tile.rows, recipe.tile.columns]).float()
            self.state[v] = torch.where(self.known[v], self.state[v] + trajectory.perturbation * noise, self.filling[v])
        self.initial = None

    def go_on_from(self, step: int, state: Tensor) -> None:
        self.state, self.step, self.initial = state, step, None

    def features(self, n: int) -> Tensor:
        """All that enters beside the state after ``n`` steps; ``DataError`` where prescribed fields cannot be read."""
        recipe = self.loaded.recipe
        if n > 0 and recipe.roles.prescribed:
            fields = self.reader(find_time(self.trajectory.times[n], self.reader, recipe.step))
            self.normalised, self.valid = recipe.normalised(fields)
        return torch.from_numpy(recipe.inputs(self.normalised, self.valid, *self.dates[n : n + 2]))

    @torch.inference_mode()
    def advance(self, features: Tensor) -> None:
        """All processes of the globe call this alike."""
        batch = (x[None].to(self.device) for x in (self.state, features))
        forecast = one_step(self.loaded.model, self.loaded.recipe, *batch)[0].cpu()
        self.state, self.step = torch.where(self.known, forecast, self.filling), self.step + 1

    def fields(self) -> Tensor:
        """In their units, NaN where there is no value   [V, H, W] float32"""
        if self.step == 0 and self.initial is not None:
            return self.initial
        return torch.where(self.known, self.loaded.recipe.statistics.physical(self.state), torch.nan)


def trajectories(starts: Sequence[int], layout: Layout, *, perturbation: float, seed: int) -> Iterator[Trajectory]:
    """Of each initial time all members, one after the other; ``starts`` are those of the last initial times."""
    first, members = len(layout.times) - len(starts), layout.members or 1
    for i, start in enumerate(starts, first):
        for member in range(members):
            yield Trajectory(i * members + member, start, layout.times[i], member, perturbation, seed)
