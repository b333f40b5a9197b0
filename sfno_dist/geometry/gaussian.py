"""Gaussian colatitudes: the rules of highest degree, without the poles (Gauss) or with them (Lobatto).

Formulas: M. Abramowitz and I. Stegun, "Handbook of Mathematical Functions", 25.4.29 and 25.4.32.
"""

import numpy as np
from numpy.polynomial import legendre


def legendre_gauss(nlat: int) -> tuple[np.ndarray, np.ndarray]:
    """Colatitudes of the roots of P_nlat and their Gauss-Legendre weights, both [nlat]."""
    nodes, weights = legendre.leggauss(nlat)
    return np.arccos(nodes[::-1]), weights[::-1].copy()


def lobatto(nlat: int) -> tuple[np.ndarray, np.ndarray]:
    """Colatitudes of the poles and of the extrema of P_(nlat - 1), and Gauss-Lobatto weights, both [nlat]."""
    degree = nlat - 1
    # The roots of P'_degree are the nodes of the Gauss-Jacobi rule with alpha = beta = 1: the eigenvalues of
    # a symmetric tridiagonal matrix (G. Golub and J. Welsch, Mathematics of Computation 23, 1969).
    k = np.arange(1.0, nlat - 2)
    off_diagonal = np.sqrt(k * (k + 2.0) / ((2.0 * k + 1.0) * (2.0 * k + 3.0)))
    inner = np.linalg.eigvalsh(np.diag(off_diagonal, -1)) if nlat > 2 else np.zeros(0)
    p, dp = _legendre_and_slope(inner, degree)
    # One Newton step on P' = 0; Legendre's equation gives P'' from P and P'.
    curvature = (2.0 * inner * dp - degree * (degree + 1.0) * p) / (1.0 - inner**2)
    nodes = np.concatenate([[1.0], (inner - dp / curvature)[::-1], [-1.0]])
    p, _ = _legendre_and_slope(nodes, degree)
    return np.arccos(nodes), 2.0 / (nlat * (nlat - 1.0) * p**2)


def _legendre_and_slope(x: np.ndarray, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """P_degree and its derivative at x by the three-term recurrence."""
    previous, current = np.zeros_like(x), np.ones_like(x)
    slope_previous, slope = np.zeros_like(x), np.zeros_like(x)
    for n in range(degree):
        following = ((2 * n + 1) * x * current - n * previous) / (n + 1)
        slope_previous, slope = slope, slope_previous + (2 * n + 1) * current  # P'_(n+1) = P'_(n-1) + (2n+1) P_n
        previous, current = current, following
    return current, slope
