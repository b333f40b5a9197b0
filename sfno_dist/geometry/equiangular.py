"""Equally spaced colatitudes: with both poles (Clenshaw-Curtis) or at cell centres (Fejer).

Both rules integrate over x = cos(colatitude) in [-1, 1] and have positive weights that sum to 2.
Formulas: J. Waldvogel, "Fast construction of the Fejer and Clenshaw-Curtis quadrature rules",
BIT Numerical Mathematics 46 (2006), equations 1.5 to 1.10, written as sums of cosines.
"""

import numpy as np


def pole_to_pole(nlat: int) -> tuple[np.ndarray, np.ndarray]:
    """Colatitudes k pi / (nlat - 1) and their Clenshaw-Curtis weights, both [nlat]."""
    n = nlat - 1
    theta = np.pi * np.arange(nlat) / n
    harmonic = np.arange(1, n // 2 + 1)
    factor = np.where(2 * harmonic == n, 1.0, 2.0) / (4.0 * harmonic**2 - 1.0)
    # w_k = c_k / n * (1 - sum_j b_j cos(2 j theta_k) / (4 j^2 - 1)),  c = 1 at the poles, else 2
    weights = 2.0 / n * (1.0 - np.cos(2.0 * np.outer(theta, harmonic)) @ factor)
    weights[[0, -1]] /= 2.0
    return theta, weights


def cell_centres(nlat: int) -> tuple[np.ndarray, np.ndarray]:
    """Colatitudes (k + 1/2) pi / nlat and the weights of Fejer's first rule, both [nlat]."""
    theta = np.pi * (np.arange(nlat) + 0.5) / nlat
    harmonic = np.arange(1, nlat // 2 + 1)
    # w_k = 2 / n * (1 - 2 sum_j cos(2 j theta_k) / (4 j^2 - 1))
    weights = 2.0 / nlat * (1.0 - np.cos(2.0 * np.outer(theta, harmonic)) @ (2.0 / (4.0 * harmonic**2 - 1.0)))
    return theta, weights
