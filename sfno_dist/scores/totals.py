"""Sums over times of all that ``definitions`` gives, filled in field by field; their size knows no number of times.

Dims: V variables, L lead times, R regions, K wavenumbers, M members, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sfno_dist.geometry import Grid
from sfno_dist.scores import definitions


class Means:
    """Means over times, NaN counting for nothing, of named arrays that come place by place."""

    def __init__(self, *shape: int) -> None:
        self._shape = shape
        self._sums: dict[str, np.ndarray] = {}
        self._counts: dict[str, np.ndarray] = {}

    def add(self, values: dict[str, np.ndarray], place: tuple[int, ...]) -> None:
        for name, value in values.items():
            if name not in self._sums:
                whole = (*self._shape, *value.shape)
                self._sums[name], self._counts[name] = np.zeros(whole), np.zeros(whole, np.int32)
            held = ~np.isnan(value)
            self._sums[name][place] += np.where(held, value, 0.0)
            self._counts[name][place] += held

    def means(self) -> dict[str, np.ndarray]:
        return {
            name: np.divide(sums, counts := self._counts[name], out=np.full(sums.shape, np.nan), where=counts > 0)
            for name, sums in self._sums.items()
        }


class Totals:
    """``scores`` [kinds, V, L, R], ``spectra`` [2 (forecast, truth), V, L, R, K] and ``maps`` [V, map leads, H, W]."""

    def __init__(self, grid: Grid, kinds: Sequence[str], variables: int, leads: int, map_leads: Sequence[int]) -> None:
        self.grid, self.kinds, self.map_leads = grid, list(kinds), list(map_leads)
        self.weights = definitions.region_weights(grid)
        self.scores = Means(len(kinds), variables, leads)
        self.spectra = Means(2, variables, leads)
        self.maps = Means(variables, len(map_leads))

    def add(self, place: tuple[int, int], members: np.ndarray, truth: np.ndarray, **baselines: np.ndarray) -> None:
        """A forecast [M, H, W] at ``place`` (variable, lead time), the truth and the baselines [H, W]."""
        fields = {"forecast": members.mean(0, dtype=np.float64), **baselines}
        for k, kind in enumerate(self.kinds):
            found = definitions.error_scores(fields[kind], truth, self.weights, baselines.get("climatology"))
            found["crps"] = found["mae"]  # of a forecast without spread
            if kind == "forecast" and len(members) > 1:
                found |= definitions.ensemble_scores(members, truth, self.weights)
            self.scores.add(found, (k, *place))
        for s, field in enumerate((members, truth[None])):
            power = definitions.zonal_spectrum(field, self.grid, self.weights)
            self.spectra.add({"power": power.mean(0)}, (s, *place))
        if place[1] in self.map_leads:
            error = fields["forecast"] - truth
            self.maps.add({"bias": error, "mse": error**2}, (place[0], self.map_leads.index(place[1])))
