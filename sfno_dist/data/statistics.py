"""Mean, spread and climatology of the variables over the training period, in one pass.

Dims: V variables, H rows, W columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from sfno_dist.geometry import Grid


@dataclass(frozen=True)
class Statistics:
    """Of the training period: ``mean`` and ``std`` over area and time [V], ``climatology`` by month [12, V, H, W].

    All in the variables' units, float32. Months without a training time are NaN in ``climatology``.
    """

    mean: np.ndarray
    std: np.ndarray
    climatology: np.ndarray

    def normalise(self, fields: np.ndarray) -> np.ndarray:
        """(x - mean) / std   [..., V, H, W] float32"""
        return ((fields - self.mean[:, None, None]) / self.std[:, None, None]).astype(np.float32)

    def denormalise(self, fields: np.ndarray) -> np.ndarray:
        """x std + mean   [..., V, H, W] float32"""
        return (fields * self.std[:, None, None] + self.mean[:, None, None]).astype(np.float32)

    def month_climatology(self, time: np.datetime64) -> np.ndarray:
        """Mean of the month of ``time`` over the training years, NaN where they lack it   [V, H, W], normalised"""
        return self.normalise(self.climatology[int(time.astype("datetime64[M]").astype(int) % 12)])

    @classmethod
    def over(
        cls,
        times: Iterable[np.datetime64],
        read: Callable[[int], np.ndarray],
        *,
        indices: np.ndarray,
        grid: Grid,
        variables: tuple[str, ...],
    ) -> Statistics:
        """Statistics over ``indices`` of the time axis; ``read(i)`` gives the fields [V, H, W] of time i.

        Area-weighted, in float64. A constant variable gets std 1 and a warning that names it.
        """
        times = np.asarray(times)
        share = grid.area_shares
        sums = np.zeros((12, len(variables), *grid.shape))
        squares, shift = np.zeros(len(variables)), None
        counts = np.zeros(12)
        for index in tqdm(indices, desc="statistics of the training period", unit="time", leave=False):
            fields = read(int(index)).astype(np.float64)
            # Variances of values near 300 K or 1e5 Pa keep their digits when taken about a value of that size.
            shift = (fields * share).sum((-2, -1)) if shift is None else shift
            month = int(times[index].astype("datetime64[M]").astype(int) % 12)
            sums[month] += fields
            squares += ((fields - shift[:, None, None]) ** 2 * share).sum((-2, -1))
            counts[month] += 1
        total = counts.sum()
        mean = (sums.sum(0) * share).sum((-2, -1)) / total
        variance = np.maximum(squares / total - (mean - shift) ** 2, 0.0)
        std = np.sqrt(variance)
        constant = std <= 1e-6 * np.maximum(np.abs(mean), 1e-30)
        if constant.any():
            names = ", ".join(name for name, is_constant in zip(variables, constant, strict=True) if is_constant)
            warnings.warn(f"{names}: constant over the training period; normalised with a spread of 1", stacklevel=2)
        with np.errstate(invalid="ignore"):
            climatology = sums / counts[:, None, None, None]
        std = np.where(constant, 1.0, std)
        return cls(mean.astype(np.float32), std.astype(np.float32), climatology.astype(np.float32))
