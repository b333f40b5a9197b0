"""The golden cases: float64 results and gradients of spherical attention, computed once by brute force."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfno_dist import Grid

FOLDER = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
RESULTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class GoldenCase:
    grid_in: Grid
    grid_out: Grid
    theta_cutoff: float
    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor
    results: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]

    @classmethod
    def load(cls, name: str, dtype: torch.dtype = torch.float64) -> GoldenCase:
        with np.load(FOLDER / f"{name}.npz") as file:
            arrays = dict(file)
        q, k, v, dy = (torch.from_numpy(arrays[x]).to(dtype) for x in ("q", "k", "v", "dy"))
        return cls(
            Grid(str(arrays["grid_in"]), *k.shape[2:]),
            Grid(str(arrays["grid_out"]), *q.shape[2:]),
            float(arrays["theta_cutoff"]),
            *(x.requires_grad_() for x in (q, k, v)),
            dy,
            {x: arrays[x] for x in RESULTS},
            arrays,
        )


def largest_relative_error(got: Tensor, expected: np.ndarray) -> float:
    """Largest difference over the largest expected value."""
    return float(np.abs(got.detach().double().numpy() - expected).max() / np.abs(expected).max())
