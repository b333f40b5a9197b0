"""The scores of one field at one time, by the definitions of WeatherBench 2.

S. Rasp et al., "WeatherBench 2: A benchmark for the next generation of data-driven global weather models", Journal of
Advances in Modeling Earth Systems 16, 2024 (WB2 below), and its evaluation code. Means over times are taken of what
these functions give, and roots after that (``finished``).

Dims: M members, H rows, W columns, R regions, K wavenumbers. NaN marks cells without a value; they count for nothing.
"""

from __future__ import annotations

import numpy as np

from sfno_dist.geometry import Grid

EARTH_RADIUS = 6_371_000.0  # m
#: region -> southernmost and northernmost latitude in degrees, both included (WB2, as in its evaluation script)
REGIONS = {
    "globe": (-90.0, 90.0),
    "northern extratropics": (20.0, 90.0),
    "tropics": (-20.0, 20.0),
    "southern extratropics": (-90.0, -20.0),
}
#: scores of one forecast -> what they are, and whether they are in the variable's units
SCORES = {
    "rmse": ("root mean square error of the ensemble mean", True),
    "mae": ("mean absolute error of the ensemble mean", True),
    "bias": ("mean error of the ensemble mean", True),
    "acc": ("anomaly correlation coefficient of the ensemble mean", False),
    "crps": ("continuous ranked probability score, fair", True),
    "spread": ("root of the mean ensemble variance", True),
    "spread_skill": ("spread / RMSE of the ensemble mean", False),
}


def region_weights(grid: Grid) -> np.ndarray:
    """Weight of a point of each row in each region of ``REGIONS``; 0 outside it   [R, H]

    w(i) proportional to sin(upper edge) - sin(lower edge), the edges halfway between rows (WB2, equation 1).
    """
    areas = -np.diff(np.cos(grid.row_edges))  # [H]
    latitudes = grid.latitudes_degrees
    return np.stack([np.where((latitudes >= s) & (latitudes <= n), areas, 0.0) for s, n in REGIONS.values()])


def region_mean(field: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted mean over the cells of each region that have a value, NaN where none has   [R]"""
    held = ~np.isnan(field)
    sums = weights @ np.where(held, field, 0.0).sum(-1, dtype=np.float64)  # [R]
    areas = weights @ held.sum(-1, dtype=np.float64)
    return np.divide(sums, areas, out=np.full(len(sums), np.nan), where=areas > 0)


def error_scores(
    forecast: np.ndarray, truth: np.ndarray, weights: np.ndarray, climatology: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """``mse``, ``mae``, ``bias`` and, with a climatology, ``acc`` of a field [H, W]   [R] each

        mse = sum w (f - o)^2 / sum w    (WB2, equation 2, before the mean over times and the root)
        mae = sum w |f - o| / sum w      bias = sum w (f - o) / sum w
        acc = sum w (f - c)(o - c) / sqrt(sum w (f - c)^2  sum w (o - c)^2)    (WB2: for each time, then averaged)

    ``coverage`` is the share of the region's area on which forecast and truth have values.
    """
    error = forecast.astype(np.float64) - truth
    scores = {"mse": region_mean(error**2, weights), "mae": region_mean(np.abs(error), weights)}
    scores |= {"bias": region_mean(error, weights), "coverage": region_mean(1.0 - np.isnan(error), weights)}
    if climatology is not None:
        scores["acc"] = _anomaly_correlation(
            forecast - np.float64(climatology), truth - np.float64(climatology), weights
        )
    return scores


def _anomaly_correlation(forecast: np.ndarray, truth: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Of anomalies [H, W]; NaN where one has none, as climatology itself   [R]"""
    product = forecast * truth
    held = np.where(np.isnan(product), np.nan, 1.0)
    variances = region_mean(held * forecast**2, weights) * region_mean(held * truth**2, weights)
    root = np.sqrt(variances)
    return np.divide(region_mean(product, weights), root, out=np.full(len(root), np.nan), where=root > 0)


def ensemble_scores(members: np.ndarray, truth: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """``crps`` and ``variance`` of an ensemble [M, H, W] of at least 2 members   [R] each

        crps     = 1/M sum_m |x_m - o|  -  1/(2 M (M - 1)) sum_m sum_n |x_m - x_n|     (WB2: CRPS, unbiased in M)
        variance = 1/(M - 1) sum_m (x_m - mean)^2                                       (WB2: spread, before the root)

    The fair form is that of C. Ferro, Quarterly Journal of the Royal Meteorological Society 140, 2014. With x sorted,
    sum_m sum_n |x_m - x_n| = 2 sum_m (2 m - M + 1) x_m, m from 0, so that nothing of size M^2 is stored.
    """
    count = len(members)
    ranked = np.sort(members.astype(np.float64), axis=0)
    ranks = (2.0 * np.arange(count) - count + 1.0)[:, None, None]
    between = (ranks * ranked).sum(0) / (count * (count - 1.0))  # half the mean distance of two members   [H, W]
    crps = np.abs(ranked - truth).mean(0) - between
    variance = np.where(np.isnan(truth), np.nan, ranked.var(0, ddof=1))
    return {"crps": region_mean(crps, weights), "variance": region_mean(variance, weights)}


def zonal_spectrum(field: np.ndarray, grid: Grid, weights: np.ndarray) -> np.ndarray:
    """Zonal power of a field [..., H, W], mean over the rows of each region that have all values   [..., R, K]

        F_k = 1/W sum_l f_l exp(-2 pi i k l / W)    S_k = C |F_k|^2 (k = 0)  and  2 C |F_k|^2 (k > 0)

    with C the circumference of the row in metres (WB2, zonal energy spectra): units^2 m. The wave of 2 columns, which
    has no twin, counts once, so that over a row sum_k S_k = C mean(f^2) exactly.
    """
    circumference = 2.0 * np.pi * EARTH_RADIUS * np.sin(grid.colatitudes)  # [H]
    whole = ~np.isnan(field).any(-1)  # [..., H]
    power = np.abs(np.fft.rfft(np.where(whole[..., None], field, 0.0), axis=-1, norm="forward")) ** 2
    power[..., 1 : (grid.nlon + 1) // 2] *= 2.0
    power *= circumference[:, None]
    areas = np.einsum("rh,...h->...r", weights, whole.astype(np.float64))[..., None]
    sums = np.einsum("rh,...hk->...rk", weights, np.where(whole[..., None], power, 0.0))
    return np.divide(sums, areas, out=np.full(sums.shape, np.nan), where=areas > 0)


def finished(means: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The scores of ``SCORES`` from means over times of what the functions above give.

        rmse = sqrt(mean mse)    spread = sqrt(mean variance)    spread_skill = spread / rmse    (WB2)

    The ratio is 1 for a calibrated ensemble of many members; M members fall short by sqrt(M / (M + 1)).
    """
    scores = {name: mean for name, mean in means.items() if name not in ("mse", "variance")}
    scores["rmse"] = np.sqrt(means["mse"])
    if "variance" in means:
        scores["spread"] = np.sqrt(means["variance"])
        missing = np.full(scores["rmse"].shape, np.nan)
        scores["spread_skill"] = np.divide(scores["spread"], scores["rmse"], out=missing, where=scores["rmse"] > 0)
    return scores
