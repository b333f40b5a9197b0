"""One training step of one process of a layout, run without values: what it holds and what it receives.

No formula of a layer stands here. The model itself runs on tensors that have sizes and no values (PyTorch's
``FakeTensorMode``), on a mesh on paper, so that a new layer is planned as soon as it is written.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from sfno_dist.comm.wire import Flight
from sfno_dist.data.curriculum import Curriculum
from sfno_dist.data.recipe import Recipe, Roles
from sfno_dist.data.statistics import Statistics
from sfno_dist.data.timeline import TimeStep
from sfno_dist.geometry import Grid
from sfno_dist.layers import SphericalAttention
from sfno_dist.mesh import ProcessMesh
from sfno_dist.plan.memory import LiveBytes
from sfno_dist.training.config import ConfigError
from sfno_dist.training.losses import mean_loss
from sfno_dist.training.module import ForecastModule
from sfno_dist.training.run import module_of

DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}


@dataclass(frozen=True)
class Cost:
    """Bytes that one process holds and receives in a step; ``activations`` is the peak less all that stays.

    ``buckets`` are DDP's copies of the gradients, where several processes sum them. ``largest``: (layer, shape, bytes,
    how many) of the largest tensors that a step makes. ``pairs``: of queries and keys that attention works on, of each
    band of latitude that a row of processes has.
    """

    mesh: ProcessMesh
    parameters: int
    weights: int
    gradients: int
    buckets: int
    optimizer: int
    batch: int
    activations: int
    received: int
    largest: tuple[tuple[str, tuple[int, ...], int, int], ...]
    pairs: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Attention of the busiest process over the mean."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs)

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.buckets + self.optimizer + self.batch + self.activations


def step_cost(config: DictConfig, grid: Grid, mesh: ProcessMesh) -> Cost:
    """Of the process ``mesh.rank``, a layout on paper, for fields on ``grid``; batches as ``config`` has them."""
    module = paper_module(config, grid, mesh)
    precise = in_precision(module, str(config.trainer.precision))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        _without_values(module, mode)
        optimizer = module.bare_optimizer()
        live = LiveBytes(module.model)
        with live:
            batch = paper_batch(config, module)
            held_by_batch = live.held
            # In the second step all that stays is there, and Lightning frees the old gradients after the forward.
            for _ in range(2):
                live.peak, before = live.held, Flight.planned_bytes
                live.made.clear()
                training_step(module, batch, optimizer, precise)
            received = Flight.planned_bytes - before
        parameters = list(module.parameters())
        weights = sum(t.nbytes for t in [*parameters, *module.buffers()])
        gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        states = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    layers = [layer for layer in module.modules() if isinstance(layer, SphericalAttention)]
    largest = sorted(((*key, count) for key, count in live.made.items()), key=lambda one: -one[2])
    return Cost(
        mesh=mesh, parameters=sum(p.numel() for p in parameters), weights=weights, gradients=gradients,
        buckets=gradients if mesh.size > 1 else 0, optimizer=states, batch=held_by_batch,
        activations=live.peak - gradients - states - held_by_batch, received=received, largest=tuple(largest[:5]),
        pairs=tuple(np.sum([pairs(layer) for layer in layers], axis=0).tolist()),
    )  # fmt: skip


def training_step(
    module: ForecastModule,
    batch: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    precise: contextlib.AbstractContextManager,
) -> None:
    """In the order of Lightning: forward, old gradients away, backward, optimiser."""
    if module.model.draws:
        module.model.randomness.at(0, 0, samples=batch["number"])  # type: ignore[union-attr,operator]
    with precise:
        means = module.area_means(module(batch), batch)
        loss = mean_loss(means, module.weights, batch["weight"])
    del means
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def pairs(layer: SphericalAttention) -> np.ndarray:
    """Of a query of each band of latitude and a key anywhere   [polar]"""
    return np.add.reduceat(layer.neighbourhood.neighbours_per_row(), layer.queries.row_bounds[:-1])


def paper_module(config: DictConfig, grid: Grid, mesh: ProcessMesh) -> ForecastModule:
    """As a training makes it, without data and never compiled."""
    plain = OmegaConf.merge(config, {"model": {"compile": False}})
    assert isinstance(plain, DictConfig)
    return module_of(plain, _recipe(config, grid, mesh), [])


def paper_batch(config: DictConfig, module: ForecastModule) -> dict[str, Tensor]:
    """One as the DataModule gives it to each process, of the share of its replica; fields are drawn anyhow."""
    recipe = module.recipe
    samples, steps = -(-config.data.batch_size // recipe.mesh.data), _longest_rollout(config)
    shape, dtype = recipe.tile.tile_shape, next(module.parameters()).dtype
    batch = {
        "state": torch.randn(samples, steps + 1, recipe.out_channels, *shape, dtype=dtype),
        "features": torch.randn(samples, steps, recipe.feature_channels, *shape, dtype=dtype),
        "climatology": torch.randn(samples, steps, recipe.out_channels, *shape),
        "weight": torch.ones(samples, dtype=dtype),
        "number": torch.arange(samples),
    }
    if recipe.filled_outputs:
        batch["valid"] = torch.ones(samples, steps + 1, recipe.out_channels, *shape, dtype=torch.bool)
    return batch


def _recipe(config: DictConfig, grid: Grid, mesh: ProcessMesh) -> Recipe:
    data = config.data
    roles = Roles(*(tuple(data.get(role, ())) for role in ("variables", "diagnostic", "prescribed")))
    count = len(roles.variables)
    zeros, ones = np.zeros(count), np.ones(count)
    maps: Any = {name: np.zeros(grid.shape) for name in ("relief", "land_mask") if data.get(name)}
    recipe = Recipe(
        roles, ("",) * count, grid, TimeStep(6, "hours"), tuple(data.get("features", ())),
        Statistics(zeros, ones, None, zeros), fill=dict(data.get("fill") or {}),
        mask_channels=tuple(data.get("mask_channels", ())), **maps,
    )  # fmt: skip
    return replace(recipe.cut(mesh), whole=None)


def _longest_rollout(config: DictConfig) -> int:
    """Steps of the longest training rollout that the curriculum comes to; ``DataError`` for what is none."""
    steps = config.data.get("rollout_steps", 1)
    steps = steps.get("train", 1) if isinstance(steps, DictConfig) else steps
    return max(count for _, count in Curriculum(steps, "train").stages)


def _without_values(module: nn.Module, mode: FakeTensorMode) -> None:
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                fake = mode.from_tensor(parameter.detach())
                layer._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for name, buffer in layer._buffers.items():
            layer._buffers[name] = None if buffer is None else mode.from_tensor(buffer)


def in_precision(module: nn.Module, text: str) -> contextlib.AbstractContextManager:
    """What Lightning's ``precision`` computes in; -true also turns the module."""
    bits, _, kind = text.partition("-")
    if bits not in DTYPES or kind not in ("true", "mixed", ""):
        raise ConfigError(f"trainer.precision={text} is none that plan knows: {', '.join(DTYPES)}, -true or -mixed")
    if kind == "mixed" or (bits in ("bf16", "16") and not kind):  # Lightning's short names of mixed precision
        return torch.autocast("cpu", DTYPES[bits])
    module.to(DTYPES[bits])
    return contextlib.nullcontext()
