"""Which layouts a number of processes can take, what each costs its busiest process, and which one to take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from omegaconf import DictConfig
from tqdm import tqdm

from sfno_dist.geometry import Grid
from sfno_dist.mesh import Decomposition, ProcessMesh
from sfno_dist.plan.step import Cost, step_cost
from sfno_dist.training.config import ConfigError

UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
USABLE = 0.9  # of a device's memory; kernels, libraries and fragmentation take the rest
BALANCED = 1.25  # times the mean: work beyond it weighs more than what is received


@dataclass(frozen=True)
class Choice:
    """One layout, the cost of its busiest process, and whether it fits into the memory asked for."""

    sizes: tuple[int, int, int]
    cost: Cost
    fits: bool


def busiest(config: DictConfig, grid: Grid, sizes: tuple[int, int, int]) -> Cost:
    """The largest of each number over the processes of a layout: by a pole, in the middle, of most rows and columns.

    The hemispheres are nearly alike, and columns but for their width, which differs by one at most.
    """
    row_balance = config.mesh.row_balance
    mesh = ProcessMesh.on_paper(*sizes, row_balance=row_balance)
    tiles = [Decomposition(one, mesh) for one in (grid, Grid(**config.grid.latent))]
    tallest = int(np.sum([np.diff(tile.row_bounds) / tile.grid.nlat for tile in tiles], axis=0).argmax())
    widest = int(np.sum([np.diff(tile.column_bounds) / tile.grid.nlon for tile in tiles], axis=0).argmax())
    costs = []
    for band in sorted({0, mesh.polar // 2, tallest}):
        one = ProcessMesh.on_paper(*sizes, rank=band * mesh.azimuth + widest, row_balance=row_balance)
        costs.append(step_cost(config, grid, one))
    most = max(costs, key=lambda cost: cost.total)
    return replace(most, received=max(cost.received for cost in costs))


def choices(config: DictConfig, grid: Grid, processes: int, memory: float | None) -> list[Choice]:
    """Every layout of ``processes`` that the grids and the batch allow; ``ConfigError`` where there is none."""
    latent = config.grid.latent
    rows, columns = min(grid.nlat, latent.nlat), min(grid.nlon, latent.nlon)
    sizes = [
        (data, polar, processes // data // polar)
        for data in range(1, min(processes, config.data.batch_size) + 1)
        for polar in range(1, processes // data + 1)
        if processes % (data * polar) == 0 and polar <= rows and processes // data // polar <= columns
    ]
    if not sizes:
        raise ConfigError(
            f"{processes} processes have no layout for {rows} rows, {columns} columns and data.batch_size="
            f"{config.data.batch_size}; take fewer, or a larger batch"
        )
    found = []
    for one in tqdm(sizes, desc="layouts", unit="layout", delay=2.0, leave=False):
        cost = busiest(config, grid, one)
        found.append(Choice(one, cost, memory is None or cost.total <= USABLE * memory))
    return found


def recommended(found: Sequence[Choice]) -> Choice | None:
    """Of those that fit, with balanced work where there are such, the one whose busiest process receives least."""
    fit = [one for one in found if one.fits]
    balanced = [one for one in fit if one.cost.imbalance <= BALANCED] or fit
    return min(balanced, key=lambda one: (one.cost.received, one.cost.total), default=None)


def parsed_memory(text: str) -> float:
    """Bytes of a text such as 80GB or 512MiB."""
    read = re.fullmatch(r"([0-9.]+) ?([KMG]i?B)", text)
    try:
        if read is not None and float(read[1]) > 0:
            return float(read[1]) * UNITS[read[2]]
    except ValueError:
        pass
    raise ConfigError(f"--memory reads like 80GB or 512MiB, got {text!r}")
