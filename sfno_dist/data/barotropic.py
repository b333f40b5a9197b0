"""Barotropic flow on the sphere, by spherical harmonics: what the demo data are made with.

Vorticity zeta = laplacian(psi) obeys d(zeta)/dt = -div(q v) with q = zeta + f (1 + h / H), v = k x grad(psi), h the
relief. Products are taken on a Gaussian grid that resolves them without aliasing, so that energy and, over flat
ground, enstrophy are kept up to the error of the time step. Dims: M zonal wavenumbers, N degrees n, H rows, W columns.
"""

from __future__ import annotations

import numpy as np

from sfno_dist.geometry import Grid

RADIUS = 6.37122e6  # m
OMEGA = 7.292e-5  # 1/s
GRAVITY = 9.80616  # m/s2, all three as in Williamson et al. (1992)


def legendre(mu: np.ndarray, truncation: int) -> tuple[np.ndarray, np.ndarray]:
    """P_n^m(mu), whose squares integrate to 1 over mu, and (1 - mu^2) dP/dmu   2 x [M, H, N] for m, n <= truncation

    By recurrence over n: with e(n, m) = sqrt((n^2 - m^2) / (4 n^2 - 1)),
    e(n+1) P_(n+1) = mu P_n - e(n) P_(n-1) and (1 - mu^2) dP_n/dmu = (n + 1) e(n) P_(n-1) - n e(n+1) P_(n+1).
    """
    size = truncation + 2  # one degree more than kept, for the derivative
    p = np.zeros((size, mu.size, size + 1))
    n, m = np.arange(size + 1)[None, :], np.arange(size)[:, None]
    e = np.sqrt(np.maximum(n**2 - m**2, 0) / (4.0 * n**2 - 1))  # [M, N]; the only negative is at n = 0, where m = 0
    diagonal = np.full(mu.size, np.sqrt(0.5))
    for order in range(size):
        p[order, :, order] = diagonal
        for degree in range(order, size):
            before = p[order, :, degree - 1] if degree > order else 0.0
            p[order, :, degree + 1] = (mu * p[order, :, degree] - e[order, degree] * before) / e[order, degree + 1]
        diagonal = diagonal * np.sqrt((2 * order + 3.0) / (2 * order + 2.0) * (1 - mu**2))
    kept, e = slice(0, truncation + 1), e[: truncation + 1, None]
    below = np.concatenate([np.zeros((truncation + 1, mu.size, 1)), p[kept, :, :truncation]], axis=2)
    degrees = np.arange(truncation + 1)
    slope = (degrees + 1) * e[..., kept] * below - degrees * e[..., 1 : truncation + 2] * p[kept, :, 1 : truncation + 2]
    triangle = degrees >= np.arange(truncation + 1)[:, None, None]
    return p[kept, :, kept] * triangle, slope * triangle


class Harmonics:
    """Fields on ``grid`` from coefficients [M, N] complex, and back where the grid integrates products exactly.

    A field is the real part of sum_m (2 - [m = 0]) exp(i m lon) sum_n c[m, n] P_n^m(sin lat).
    """

    def __init__(self, grid: Grid, truncation: int) -> None:
        self.grid, self.truncation = grid, truncation
        # Winds have no components at a pole itself; a row there takes those of a point 600 m from it.
        self.mu = np.cos(np.clip(grid.colatitudes, 1e-4, np.pi - 1e-4))
        self.p, self.slope = legendre(self.mu, truncation)
        self.m = np.arange(truncation + 1)[:, None]
        n = np.arange(truncation + 1)
        self.laplacian = -n * (n + 1) / RADIUS**2
        self.inverse = np.divide(1.0, self.laplacian, out=np.zeros(n.size), where=n > 0)
        self.cosine2 = (1 - self.mu**2)[:, None]
        self.first = np.exp(1j * self.m[:, 0] * np.radians(grid.longitudes_degrees[0]))

    def field(self, c: np.ndarray) -> np.ndarray:
        """[H, W] float64"""
        return self._to_grid(self._sum(self.p, c))

    def winds(self, psi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """u cos(lat) and v cos(lat) of a stream function, in m/s   2 x [H, W]"""
        east = self._to_grid(self._sum(self.slope, psi)) / -RADIUS
        return east, self._to_grid(self._sum(self.p, 1j * self.m * psi)) / RADIUS

    def coefficients(self, field: np.ndarray) -> np.ndarray:
        """c[m, n] = sum_rows w P_n^m(mu) F_m, F the Fourier coefficients of each row   [M, N] complex"""
        return self._project(self.p, self._fourier(field))

    def divergence(self, east: np.ndarray, north: np.ndarray) -> np.ndarray:
        """Of a vector whose components times cos(lat) are given   [M, N] complex

        The derivative along mu is moved onto P by parts, so the mean is 0 exactly.
        """
        east, north = (self._fourier(x / self.cosine2) for x in (east, north))
        return (1j * self.m * self._project(self.p, east) - self._project(self.slope, north)) / RADIUS

    def _sum(self, table: np.ndarray, c: np.ndarray) -> np.ndarray:
        # [M, H, N] @ [M, N, 2] -> [M, H] complex
        return (table @ np.stack([c.real, c.imag], axis=2)).view(np.complex128)[..., 0]

    def _project(self, table: np.ndarray, fourier: np.ndarray) -> np.ndarray:
        weighed = (fourier * self.grid.weights).view(np.float64).reshape(*fourier.shape, 2)
        return np.ascontiguousarray(table.transpose(0, 2, 1) @ weighed).view(np.complex128)[..., 0]

    def _to_grid(self, rows: np.ndarray) -> np.ndarray:
        # irfft counts m and -m itself; wavenumbers that the grid does not hold are left out
        rows = (rows * self.first[:, None])[: self.grid.nlon // 2 + 1]
        return np.fft.irfft(rows.T, n=self.grid.nlon, axis=1, norm="forward")

    def _fourier(self, field: np.ndarray) -> np.ndarray:
        rows = np.fft.rfft(field, axis=1, norm="forward")[:, : self.truncation + 1]
        return np.ascontiguousarray((rows / self.first).T)


class BarotropicFlow:
    """A state of vorticity coefficients [M, N] and how it moves on; SI units.

    Args:
        relief: coefficients of h / H, or None for flat ground.
        damping_s: time in which the smallest scale is damped by 1/e (fourth power of the Laplacian); None for none.
    """

    def __init__(self, truncation: int, *, relief: np.ndarray | None = None, damping_s: float | None = None) -> None:
        rows = (3 * truncation + 1) // 2 + 1
        self.harmonics = Harmonics(Grid("legendre-gauss", rows, 2 * rows), truncation)
        height = 0.0 if relief is None else self.harmonics.field(relief)
        self.coriolis = 2 * OMEGA * self.harmonics.mu[:, None] * (1 + height)
        n = np.arange(truncation + 1)
        smallest = truncation * (truncation + 1)
        self.damping = 0.0 * n if damping_s is None else (n * (n + 1) / smallest) ** 4 / damping_s

    def tendency(self, zeta: np.ndarray, forcing: np.ndarray | float = 0.0) -> np.ndarray:
        """d(zeta)/dt with ``forcing``, a further one in coefficients   [M, N]"""
        spherical = self.harmonics
        east, north = spherical.winds(zeta * spherical.inverse)
        q = spherical.field(zeta) + self.coriolis
        return forcing - spherical.divergence(q * east, q * north)

    def step(self, zeta: np.ndarray, seconds: float, forcing: np.ndarray | float = 0.0) -> np.ndarray:
        """One step of the fourth-order Runge-Kutta method, then the damping, implicit."""
        a = self.tendency(zeta, forcing)
        b = self.tendency(zeta + 0.5 * seconds * a, forcing)
        c = self.tendency(zeta + 0.5 * seconds * b, forcing)
        d = self.tendency(zeta + seconds * c, forcing)
        return (zeta + seconds / 6 * (a + 2 * b + 2 * c + d)) / (1 + seconds * self.damping)

    def geopotential(self, zeta: np.ndarray) -> np.ndarray:
        """Of the flow in balance, about a mean of 0, in m2/s2   [M, N]

        laplacian(phi + v^2 / 2) = div((zeta + f) grad psi): the divergence equation without divergence.
        """
        spherical = self.harmonics
        east, north = spherical.winds(zeta * spherical.inverse)
        q = spherical.field(zeta) + 2 * OMEGA * spherical.mu[:, None]
        kinetic = spherical.coefficients((east**2 + north**2) / (2 * spherical.cosine2))
        phi = spherical.divergence(q * north, -q * east) * spherical.inverse - kinetic
        phi[0, 0] = 0.0
        return phi


def energy(zeta: np.ndarray) -> float:
    """Mean kinetic energy, m2/s2: -psi zeta / 2 over the sphere."""
    n = np.arange(zeta.shape[1])
    inverse = np.divide(RADIUS**2, n * (n + 1), out=np.zeros(n.size), where=n > 0)
    return 0.5 * _mean_square(zeta, inverse)


def enstrophy(zeta: np.ndarray) -> float:
    """Mean of zeta^2 / 2, 1/s2."""
    return 0.5 * _mean_square(zeta, np.ones(zeta.shape[1]))


def _mean_square(c: np.ndarray, factor: np.ndarray) -> float:
    twice = np.where(np.arange(c.shape[0]) > 0, 2.0, 1.0)[:, None]
    return 0.5 * float((twice * np.abs(c) ** 2 * factor).sum())
