"""Layers that draw: what a cell gets is a function of when, of the layer, and of the cell of the globe.

So it does not change with the layout of the processes, with gradient accumulation, with a second computation of
forward for activation checkpoints, or where a run is resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sfno_dist.geometry import Grid
from sfno_dist.layers.philox import WORD, Words, normal, philox
from sfno_dist.mesh import Decomposition, ProcessMesh

UNTOLD = (
    "a model with dropout or noise is told the step before it is trained: call model.randomness.at(seed, step) before "
    "each step, or model.eval() for a forecast"
)


class Moment(NamedTuple):
    """One application of a model in training, handed to its layers.

    ``key``: two int64 that hold 32 bits each, of the seed and the step; ``samples`` [B] int64, the number of each
    sample among those that all data replicas have at this step.
    """

    key: tuple[Tensor, Tensor]
    samples: Tensor


class Randomness:
    """Of a model: what its layers draw, told by whoever trains it before each step."""

    def __init__(self, mesh: ProcessMesh) -> None:
        self.mesh = mesh
        self._words: Words | None = None
        self._samples: Tensor | None = None

    def at(self, seed: int, step: int, *, micro_batch: int = 0, samples: Tensor | None = None) -> None:
        """From now on the model draws what belongs to a step of training; it draws anew at each application.

        Args:
            seed: of the run.
            step: number of steps of the optimiser so far.
            micro_batch: which of the batches whose gradients that step accumulates.
            samples: [B] number of each sample among those of all data replicas; 0, 1, ... by default.

        ``ValueError`` where the processes of a globe are not at the same step.
        """
        self.mesh.agree({"seed, step and micro-batch of the randomness": (seed, step, micro_batch)})
        words = seed & WORD, (seed >> 32) & WORD, step, micro_batch
        # Tensors, so that a compiled model is not compiled anew for each step.
        self._words = tuple(torch.tensor(word, dtype=torch.int64) for word in words)  # type: ignore[assignment]
        self._applied = torch.tensor(0, dtype=torch.int64)
        self._samples = samples

    def next(self, field: Tensor) -> Moment:
        """The moment of one more application to ``field`` [B, ...]."""
        if self._words is None:
            raise ValueError(UNTOLD)
        low, high, step, micro_batch = self._words
        applied, self._applied = self._applied, self._applied + 1
        zero = torch.zeros_like(step)
        left, right, *_ = philox((step, micro_batch, applied, zero), (low, high))
        samples = torch.arange(len(field)) if self._samples is None else self._samples
        if len(samples) != len(field):
            raise ValueError(f"randomness was told of {len(samples)} samples, the batch has {len(field)}")
        return Moment((left.to(field.device), right.to(field.device)), samples.to(field.device))


class _Draws(nn.Module):
    """Random words of the cells of this process's tile; ``place`` numbers the layers of a model that draw."""

    rows: Tensor
    columns: Tensor

    def __init__(self, grid: Grid, place: int, mesh: ProcessMesh | None) -> None:
        super().__init__()
        tile = Decomposition(grid, ProcessMesh() if mesh is None else mesh)
        self.place = place
        # Differ by tile, so they stay out of the state dict.
        self.register_buffer("rows", torch.arange(tile.rows.start, tile.rows.stop)[:, None], persistent=False)
        self.register_buffer("columns", torch.arange(tile.columns.start, tile.columns.stop), persistent=False)

    def of_cells(self, moment: Moment | None, channels: int, shaped: Callable[[Words], Words]) -> Tensor:
        """``shaped`` words for every channel of every cell   [B, channels, H, W]"""
        moment = _told(moment)
        # Four words come at a time: those of four channels.
        groups = torch.arange(-(-channels // 4), device=self.rows.device)[:, None, None]
        counter = self.columns, self.rows, groups, moment.samples[:, None, None, None]
        return torch.stack(shaped(philox(counter, _key(moment, self.place))), 2).flatten(1, 2)[:, :channels]


class Dropout(_Draws):
    """Sets each channel of each cell to zero with probability ``rate`` in training, and divides the others by 1 - rate.

    [B, C, nlat, nlon] -> same, of this process's tile (N. Srivastava et al., 2014).
    """

    def __init__(self, rate: float, grid: Grid, *, place: int, mesh: ProcessMesh | None = None) -> None:
        super().__init__(grid, place, mesh)
        check_rate(rate, "dropout")
        self.rate = rate

    def forward(self, field: Tensor, moment: Moment | None) -> Tensor:
        if not self.training or self.rate == 0.0:
            return field
        words = self.of_cells(moment, field.shape[1], lambda words: words)
        return (field / (1.0 - self.rate)).masked_fill(words < _threshold(self.rate), 0.0)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, place={self.place}"


class PathDropout(nn.Module):
    """Stochastic depth: leaves out a whole branch for a sample with probability ``rate`` in training.

    What the branch would add to its input, [B, ...], becomes zero for all cells of the globe of that sample, and is
    divided by 1 - rate for the others (G. Huang et al., "Deep networks with stochastic depth", 2016).
    """

    def __init__(self, rate: float, *, place: int) -> None:
        super().__init__()
        check_rate(rate, "path_dropout")
        self.rate, self.place = rate, place

    def forward(self, branch: Tensor, moment: Moment | None) -> Tensor:
        if not self.training or self.rate == 0.0:
            return branch
        moment = _told(moment)
        zero = torch.zeros_like(moment.samples)
        words = philox((zero, zero, zero, moment.samples), _key(moment, self.place))[0]
        dropped = (words < _threshold(self.rate)).view(-1, *[1] * (branch.ndim - 1))
        return (branch / (1.0 - self.rate)).masked_fill(dropped, 0.0)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, place={self.place}"


class Noise(_Draws):
    """Adds Gaussian noise of standard deviation ``std``, in the field's units, to the first ``channels`` in training.

    [B, C, nlat, nlon] -> same, of this process's tile; cells and channels are independent.
    """

    def __init__(self, std: float, channels: int, grid: Grid, *, place: int, mesh: ProcessMesh | None = None) -> None:
        super().__init__(grid, place, mesh)
        if not isinstance(std, (int, float)) or not 0.0 <= std < float("inf"):
            raise ValueError(f"input_noise is a standard deviation in normalised units, at least 0, got {std!r}")
        self.std, self.channels = std, channels

    def forward(self, field: Tensor, moment: Moment | None) -> Tensor:
        if not self.training or self.std == 0.0:
            return field
        noise = (self.std * self.of_cells(moment, self.channels, normal)).to(field.dtype)
        return torch.cat([field[:, : self.channels] + noise, field[:, self.channels :]], 1)

    def extra_repr(self) -> str:
        return f"std={self.std}, channels={self.channels}, place={self.place}"


def _key(moment: Moment, place: int) -> tuple[Tensor, Tensor]:
    """Of one layer at one moment."""
    zero = torch.zeros_like(moment.key[0])
    return philox((zero + place, zero, zero, zero), moment.key)[:2]


def check_rate(rate: float, name: str) -> None:
    """``ValueError`` unless it is a probability below 1."""
    if not isinstance(rate, (int, float)) or not 0.0 <= rate < 1.0:
        raise ValueError(f"{name} is a probability, at least 0 and below 1, got {rate!r}")


def _told(moment: Moment | None) -> Moment:
    if moment is None:
        raise ValueError(UNTOLD)
    return moment


def _threshold(rate: float) -> int:
    """Words below it come with probability ``rate``."""
    return round(rate * 2**32)
