"""``sfno-dist plan``: the costs of a configuration, in words and tables."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from omegaconf import DictConfig

from sfno_dist.data.sampler import GlobalBatches
from sfno_dist.data.samples import FieldReader
from sfno_dist.geometry import Grid
from sfno_dist.plan.layouts import BALANCED, USABLE, Choice, busiest, choices, parsed_memory, recommended
from sfno_dist.plan.step import Cost
from sfno_dist.training.compose import compose_training
from sfno_dist.training.config import ConfigError, arguments, refuse_unread
from sfno_dist.training.hydra_run import wanted
from sfno_dist.training.launch import Processes

PARTS = ("weights", "gradients", "buckets", "optimizer", "batch", "activations")
WORDS = {"weights": "weights and buffers", "buckets": "gradients on their way", "optimizer": "optimiser's state"}


def report(overrides: Sequence[str], *, processes: int | None = None, memory: str | None = None) -> str:
    """What a training with these overrides of train.py costs its busiest process in a step.

    With ``processes`` every layout of that many, and which to take; ``memory`` of each, as 80GB. ``ValueError`` for
    what cannot be planned. No data are read but, where ``grid`` is auto, the headers of the files.
    """
    available = None if memory is None else parsed_memory(memory)
    if processes is not None and processes < 1:
        raise ConfigError(f"--processes must be at least 1, got {processes}")
    config = compose_training([*overrides, "name=plan", "paths.output=."], may_lack=["data.paths"])
    refuse_unread(config)
    replicas = config.mesh.data if processes is None else 1
    GlobalBatches(np.empty((0, 1)), config.data.batch_size, replicas=replicas)  # refuses what a training would
    grid = _grid(config)
    if processes is not None:
        return "\n".join([_head(config, grid), *_layouts(choices(config, grid, processes, available), memory)])
    wanted(config, Processes())
    sizes = config.mesh.data, config.mesh.polar, config.mesh.azimuth
    cost = busiest(config, grid, sizes)
    lines = [_head(config, grid), *_layout(cost)]
    if available is not None:
        fits = "fits" if cost.total <= USABLE * available else "does not fit"
        lines.append(f"{fits} into {memory}, of which {USABLE:.0%} count: libraries and kernels take the rest")
    return "\n".join(lines)


def _grid(config: DictConfig) -> Grid:
    if config.grid.data != "auto":
        return Grid(**arguments(config.grid.data, "grid.data", Grid))
    if config.data.paths is None:
        raise ConfigError("plan needs a grid: name one (grid=era5_1deg) or files that are on it (data.paths=...)")
    paths = [config.data.paths] if isinstance(config.data.paths, str) else list(config.data.paths)
    return FieldReader(list(map(os.fspath, paths)), list(config.data.variables)).tile.grid


def _head(config: DictConfig, grid: Grid) -> str:
    latent = config.grid.latent
    return (
        f"{config.model.name} on {grid}, latent {latent.kind} {latent.nlat} x {latent.nlon}, batch "
        f"{config.data.batch_size}, {config.trainer.precision}"
    )


def _layout(cost: Cost) -> list[str]:
    data, polar, azimuth = cost.mesh.sizes
    lines = [f"{cost.parameters:,} parameters; data x polar x azimuth = {data} x {polar} x {azimuth}; busiest process:"]
    lines += [f"  {WORDS.get(part, part):24} {_size(getattr(cost, part)):>10}" for part in PARTS]
    lines += [f"  {'together, at the peak':24} {_size(cost.total):>10}"]
    summed = 2 * (cost.mesh.size - 1) * cost.gradients // cost.mesh.size
    lines.append(f"received in a step: {_size(cost.received)} of fields, {_size(summed)} of gradients")
    lines.append(f"attention of the busiest process: {cost.imbalance:.2f} times the mean")
    lines.append("largest tensors:")
    for layer, shape, size, count in cost.largest:
        times = f" x {count}" if count > 1 else ""
        lines.append(f"  {_size(size):>10}{times:5} {list(shape)} in {layer}")
    return lines


def _layouts(found: list[Choice], memory: str | None) -> list[str]:
    head = ["data x polar x azimuth", "memory", "received in a step", "attention / mean", *(["fits"] if memory else [])]
    rows = [head]
    for one in found:
        cells = [" x ".join(map(str, one.sizes)), _size(one.cost.total), _size(one.cost.received)]
        rows.append([*cells, f"{one.cost.imbalance:.2f}", *(["yes" if one.fits else "no"] if memory else [])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    best = recommended(found)
    if best is None:
        least = min(found, key=lambda one: one.cost.total)
        return [*lines, f"none fits into {memory} per process; the least is {_size(least.cost.total)}: take more "
                "processes, model.recompute_blocks=true, a smaller batch or a smaller model"]  # fmt: skip
    data, polar, azimuth = best.sizes
    why = ["fits" if memory else "", f"work within {BALANCED:g} of the mean" if best.cost.imbalance <= BALANCED else "",
           "its busiest process receives least"]  # fmt: skip
    reasons = ", ".join(filter(None, why))
    return [*lines, f"take mesh.data={data} mesh.polar={polar} mesh.azimuth={azimuth}: {reasons}"]


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"
