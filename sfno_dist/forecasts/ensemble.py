"""Perturbed initial conditions: smooth random fields, a function of (seed, initial time, member, variable) alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from sfno_dist.data.barotropic import RADIUS, Harmonics
from sfno_dist.geometry import Grid

LENGTH = 5e5  # m: correlations fall as exp(-(distance / LENGTH)^2 / 2), about as errors of analyses do
TRUNCATION = 63  # total wavenumber, beyond which that spectrum has nothing; or what the grid resolves


def random_field(grid: Grid, key: Sequence[int]) -> np.ndarray:
    """Gaussian of mean 0 and variance 1 at every point, alike in all directions   [nlat, nlon] float64

    sum over n of C_n (2 n + 1) / 2 = 1 with C_n ~ exp(-n (n + 1) (LENGTH / RADIUS)^2 / 2), so that correlations are
    those of a Gaussian of ``LENGTH`` (A. Weaver and P. Courtier, QJRMS 127, 2001). It is made on the whole globe
    whatever the layout, so that every layout cuts its tiles from the same bits. ``key``: whole numbers of at least 0.
    """
    harmonics = _harmonics(grid)
    n = np.arange(harmonics.truncation + 1)
    m = n[:, None]
    spectrum = np.exp(-0.5 * n * (n + 1) * (LENGTH / RADIUS) ** 2)
    spectrum[0] = 0.0  # the mean of the globe is not perturbed
    spectrum /= (spectrum * (2 * n + 1) / 2).sum()
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key))))
    draws = generator.standard_normal((2, m.size, n.size))
    # Wavenumbers m > 0 stand for -m as well: half of the variance for each part, and each part counts twice.
    spread = np.sqrt(spectrum * np.where(m > 0, 0.5, 1.0)) * (m <= n)
    return harmonics.field(spread * (draws[0] + 1j * np.where(m > 0, draws[1], 0.0)))


@lru_cache(maxsize=1)
def _harmonics(grid: Grid) -> Harmonics:
    return Harmonics(grid, min(TRUNCATION, grid.nlat - 1, (grid.nlon - 1) // 2))
