"""Mean, spread and climatology of the variables over the training period, in one pass over the data.

Dims: T times, V variables, H rows and W columns of a tile. In float64; every process reads its tile at its share of the
times, and what they found is merged without loss of digits, so that the result does not depend on the layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from sfno_dist.comm import sum_on_cpu
from sfno_dist.data.errors import DataError
from sfno_dist.data.failure import raise_everywhere
from sfno_dist.mesh import Decomposition, ProcessMesh

BLOCK_BYTES = 64e6  # of fields that are read at once


@dataclass(frozen=True)
class Statistics:
    """Of the training period: ``mean`` and ``std`` over area and time [V], ``climatology`` by month [12, V', H, W].

    ``log_epsilon`` [V]: where it is positive, the variable is log(1 + x / epsilon) before it is normalised, and mean
    and std are of that (J. Pathak et al., FourCastNet, 2022, use 1e-5 m for precipitation); 0 leaves it as it is.
    ``climatology``: of the first V' variables, in their units, float32; NaN in months without a training time. A
    checkpoint holds it only where it is a feature.
    ``change_std`` [V]: spread of the change over one step, like ``std``, where it was asked for.
    """

    mean: np.ndarray
    std: np.ndarray
    climatology: np.ndarray | None
    log_epsilon: np.ndarray
    change_std: np.ndarray | None = None

    def normalise(self, fields: np.ndarray) -> np.ndarray:
        """(x - mean) / std of the first variables, after their log   [..., V', H, W] float32"""
        count = fields.shape[-3]
        mean, std = (x[:count, None, None].astype(np.float32) for x in (self.mean, self.std))
        return ((logs(fields, self.log_epsilon[:count]) - mean) / std).astype(np.float32)

    def denormalise(self, fields: np.ndarray) -> np.ndarray:
        """The inverse of ``normalise``; logs become values of at least 0   [..., V', H, W] float32"""
        return self.physical(torch.from_numpy(np.asarray(fields, dtype=np.float32))).numpy()

    def physical(self, fields: Tensor) -> Tensor:
        """``denormalise`` of a tensor, in its type and on its device   [..., V', H, W]"""
        count = fields.shape[-3]
        mean, std = (torch.from_numpy(x[:count, None, None]).to(fields) for x in (self.mean, self.std))
        fields = fields * std + mean
        if not self.log_epsilon[:count].any():
            return fields
        epsilon = torch.from_numpy(self.log_epsilon[:count, None, None]).to(fields)
        return torch.where(epsilon > 0, (epsilon * torch.expm1(fields)).clamp_min(0.0), fields)

    def month_climatology(self, date: np.datetime64) -> np.ndarray:
        """Mean of the month of ``date`` over the training years, NaN where they lack it   [V', H, W], normalised"""
        assert self.climatology is not None  # only a loaded recipe lacks it, whose model is not told it
        return self.normalise(self.climatology[month_of(date)])


def logs(fields: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """log(1 + x / epsilon) of the variables whose epsilon is positive   [..., V, H, W]"""
    if not epsilon.any():
        return fields
    fields = fields.copy()
    for v in np.flatnonzero(epsilon):
        # Packing leaves values just below 0.
        fields[..., v, :, :] = np.log1p(np.maximum(fields[..., v, :, :], 0.0) / epsilon[v])
    return fields


def month_of(date: np.datetime64) -> int:
    """0 for January."""
    return int(date.astype("datetime64[M]").astype(int) % 12)


class Moments:
    """``weight``, ``mean`` and ``squares`` (weighted, about the mean) of V variables, merged as they come   [V] each

    T. Chan, G. Golub and R. LeVeque, The American Statistician 37, 1983: no difference of large sums is taken.
    """

    def __init__(self, count: int) -> None:
        self.weight, self.mean, self.squares = np.zeros((3, count))

    def add(self, fields: np.ndarray, weights: np.ndarray) -> None:
        """Fields [T, V, H, W] with the weight of each row [H, 1]; NaN counts for nothing."""
        for v in range(len(self.weight)):
            values = fields[:, v].astype(np.float64)
            gaps = np.isnan(values)
            of_values = np.broadcast_to(weights, values.shape)
            if gaps.any():
                of_values, values = np.where(gaps, 0.0, of_values), np.where(gaps, 0.0, values)
            weight = of_values.sum()
            if weight == 0.0:
                continue
            mean = (of_values * values).sum() / weight
            squares = (of_values * (values - mean) ** 2).sum()
            apart, total = mean - self.mean[v], self.weight[v] + weight
            self.squares[v] += squares + apart**2 * self.weight[v] * weight / total
            self.mean[v] += apart * weight / total
            self.weight[v] = total

    def merged(self, mesh: ProcessMesh) -> Moments:
        """Those of all processes together, on each of them."""
        whole = Moments(len(self.weight))
        whole.weight = _sum(self.weight, mesh)
        whole.mean = _sum(self.weight * self.mean, mesh) / np.maximum(whole.weight, np.finfo(float).tiny)
        whole.squares = _sum(self.squares + self.weight * (self.mean - whole.mean) ** 2, mesh)
        return whole

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(self.squares / np.maximum(self.weight, np.finfo(float).tiny))


class _Climatology:
    """Sums and counts by month of the first variables   [12, V', H, W]"""

    def __init__(self, shape: tuple[int, int, int], *, gaps: bool) -> None:
        self.sums = np.zeros((12, *shape))
        self.counts = np.zeros((12, *(shape if gaps else (1, 1, 1))))
        self.gaps = gaps

    def add(self, fields: np.ndarray, dates: np.ndarray) -> None:
        for field, date in zip(fields[:, : self.sums.shape[1]], dates, strict=True):
            month = month_of(date)
            self.sums[month] += np.nan_to_num(field, nan=0.0) if self.gaps else field
            self.counts[month] += ~np.isnan(field) if self.gaps else 1.0

    def mean(self, mesh: ProcessMesh) -> np.ndarray:
        sums, counts = (_sum(x, mesh, ("replicas",)) for x in (self.sums, self.counts))
        with np.errstate(invalid="ignore"):
            return (sums / counts).astype(np.float32)


def measure(
    read: Callable[[np.ndarray], np.ndarray],
    dates: np.ndarray,
    *,
    indices: np.ndarray,
    tile: Decomposition,
    variables: Sequence[str],
    outputs: int | None = None,
    log_epsilon: np.ndarray | None = None,
    gaps: bool = False,
    following: np.ndarray | None = None,
) -> Statistics:
    """Statistics over the times ``indices``, the same on every process of the tile's mesh.

    Args:
        read: the fields [T, V, H, W] of this process's tile at given times.
        dates: [all times] datetime64, for the months.
        outputs: how many of the first variables have a climatology; by default all.
        gaps: whether values may be NaN; they count for nothing.
        following: for each of ``indices`` the time one step later, or -1; with it the change's spread is measured.

    A constant variable gets std 1 and a warning that names it.
    """
    mesh, height_width = tile.mesh, tile.tile_shape
    count = len(variables)
    epsilon = np.zeros(count) if log_epsilon is None else log_epsilon
    moments, changes = Moments(count), Moments(count)
    months = _Climatology((count if outputs is None else outputs, *height_width), gaps=gaps)
    weights = tile.grid.area_shares[tile.rows]
    mine = np.array_split(np.arange(len(indices)), mesh.data)[mesh.data_index]
    bar = tqdm(
        total=len(mine), desc="statistics of the training period", unit="time", leave=False, disable=mesh.rank > 0
    )
    problem = None
    try:
        block = max(1, int(BLOCK_BYTES / (4 * count * np.prod(height_width))))
        for part in (mine[i : i + block] for i in range(0, len(mine), block)):
            now = indices[part]
            later = following[part] if following is not None else np.full(len(now), -1)
            wanted = np.union1d(now, later[later >= 0])
            fields = read(wanted)
            places = np.searchsorted(wanted, now)
            months.add(fields[places], dates[now])
            scaled = logs(fields, epsilon)
            moments.add(scaled[places], weights)
            pairs = later >= 0
            if pairs.any():
                changes.add(scaled[np.searchsorted(wanted, later[pairs])] - scaled[places[pairs]], weights)
            bar.update(len(part))
    except DataError as error:
        problem = str(error)
    bar.close()
    raise_everywhere(problem, mesh)
    whole = moments.merged(mesh)
    std = _without_constants(whole, variables)
    change_std = None if following is None else changes.merged(mesh).std
    return Statistics(whole.mean, std, months.mean(mesh), epsilon, change_std)


def _without_constants(moments: Moments, variables: Sequence[str]) -> np.ndarray:
    """The spreads, 1 for a variable that has none."""
    empty = [name for name, weight in zip(variables, moments.weight, strict=True) if weight == 0.0]
    if empty:
        raise DataError(
            f"{', '.join(empty)}: no value in the training period; choose another one with data.splits.train"
        )
    constant = moments.std <= 1e-6 * np.maximum(np.abs(moments.mean), 1e-30)
    if constant.any():
        names = ", ".join(name for name, is_constant in zip(variables, constant, strict=True) if is_constant)
        warnings.warn(f"{names}: constant over the training period; normalised with a spread of 1", stacklevel=3)
    return np.where(constant, 1.0, moments.std)


def _sum(array: np.ndarray, mesh: ProcessMesh, over: tuple[str, ...] = ("globe", "replicas")) -> np.ndarray:
    return sum_on_cpu(torch.from_numpy(np.ascontiguousarray(array)), mesh, over=over).numpy()
