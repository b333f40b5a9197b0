"""The demo's flow against exact solutions and conserved quantities, and the files that it writes."""

from pathlib import Path

import numpy as np
import pytest
import scipy.special
import xarray as xr

from sfno_dist import Grid
from sfno_dist.data import open_dataset
from sfno_dist.data.barotropic import GRAVITY, OMEGA, RADIUS, BarotropicFlow, Harmonics, energy, enstrophy, legendre
from sfno_dist.data.demo import DemoWeather, write_demo

FLOW = BarotropicFlow(21)
LATITUDE = np.arcsin(FLOW.harmonics.mu)[:, None]
LONGITUDE = np.radians(FLOW.harmonics.grid.longitudes_degrees)[None]
DAY = 86400


def run(flow: BarotropicFlow, zeta: np.ndarray, days: float, step: float = 1800.0) -> np.ndarray:
    for _ in range(round(days * DAY / step)):
        zeta = flow.step(zeta, step)
    return zeta


def random_vorticity(truncation: int = 21) -> np.ndarray:
    random = np.random.default_rng(1)
    n = np.arange(truncation + 1)
    zeta = random.standard_normal((2, n.size, n.size)) * np.triu(np.ones((n.size, n.size))) / (1 + n) ** 1.5
    zeta = 3e-5 * (zeta[0] + 1j * zeta[1])
    zeta[0] = zeta[0].real
    zeta[0, 0] = 0.0
    return zeta


def test_legendre_functions_are_scipys() -> None:
    mu = np.array([-0.95, 0.1, 0.5])
    values, slopes = legendre(mu, 8)
    for m in range(9):
        for n in range(m, 9):
            norm = np.sqrt((2 * n + 1) / 2 * scipy.special.factorial(n - m) / scipy.special.factorial(n + m))
            expected = (-1) ** m * norm * scipy.special.lpmv(m, n, mu)
            np.testing.assert_allclose(values[m, :, n], expected, atol=1e-12)
            ahead, behind = (legendre(mu + h, 8)[0][m, :, n] for h in (1e-6, -1e-6))
            np.testing.assert_allclose(slopes[m, :, n], (1 - mu**2) * (ahead - behind) / 2e-6, atol=1e-7)


def test_rossby_haurwitz_wave_moves_with_its_analytic_phase_speed() -> None:
    """Williamson et al. (1992), test case 6, whose barotropic wave is exact."""
    w = k = 7.848e-6
    r = 4
    speed = (r * (3 + r) * w - 2 * OMEGA) / ((1 + r) * (2 + r))  # radians of longitude a second

    def wave(seconds: float) -> np.ndarray:
        shape = np.sin(LATITUDE) * np.cos(LATITUDE) ** r * np.cos(r * (LONGITUDE - speed * seconds))
        return FLOW.harmonics.coefficients(2 * w * np.sin(LATITUDE) - k * (r**2 + 3 * r + 2) * shape)

    moved = run(FLOW, wave(0.0), 3)
    np.testing.assert_allclose(moved, wave(3 * DAY), atol=1e-6 * np.abs(moved).max())
    assert np.abs(wave(3 * DAY) - wave(0.0)).max() > 0.5 * np.abs(moved).max()


def test_steady_zonal_flow_stays_steady_with_its_geopotential() -> None:
    """Williamson et al. (1992), test case 2: g h = g h0 - (a Omega u0 + u0^2 / 2) sin^2(lat)."""
    u0 = 2 * np.pi * RADIUS / (12 * DAY)
    zeta = FLOW.harmonics.coefficients(2 * u0 / RADIUS * np.sin(LATITUDE) + 0 * LONGITUDE)
    later = run(FLOW, zeta, 5)
    np.testing.assert_allclose(later, zeta, atol=1e-12 * np.abs(zeta).max())
    found = FLOW.harmonics.field(FLOW.geopotential(later))
    expected = -(RADIUS * OMEGA * u0 + u0**2 / 2) * np.sin(LATITUDE) ** 2 + 0 * LONGITUDE
    np.testing.assert_allclose(found - found[0, 0], expected - expected[0, 0], atol=1e-6 * np.ptp(expected))
    east, north = FLOW.harmonics.winds(later * FLOW.harmonics.inverse)
    np.testing.assert_allclose(east, u0 * np.cos(LATITUDE) ** 2 + 0 * LONGITUDE, atol=1e-9)
    np.testing.assert_allclose(north, 0.0, atol=1e-9)


def test_energy_enstrophy_and_mean_are_kept() -> None:
    zeta = random_vorticity()
    errors = []
    for step in (1800.0, 900.0):
        later = run(FLOW, zeta, 1, step)
        assert abs(later[0, 0]) < 1e-20  # circulation; phi has mean 0, so mass too
        errors.append([abs(what(later) / what(zeta) - 1) for what in (energy, enstrophy)])
    assert np.abs(later - zeta).max() > 0.3 * np.abs(zeta).max()
    # What is lost is the error of the time step, which falls with its fourth or fifth power.
    assert max(errors[1]) < 1e-4 and errors[1][0] < errors[0][0] / 10 and errors[1][1] < errors[0][1] / 10


def test_mountains_keep_energy_and_turn_the_flow() -> None:
    relief = FLOW.harmonics.coefficients(0.3 * np.exp(-((LATITUDE - 0.7) ** 2 + (LONGITUDE - 2) ** 2) / 0.1))
    flow = BarotropicFlow(21, relief=relief)
    zeta = random_vorticity()
    later = run(flow, zeta, 1, 900.0)
    assert abs(energy(later) / energy(zeta) - 1) < 1e-4
    assert np.abs(later - run(FLOW, zeta, 1, 900.0)).max() > 0.01 * np.abs(zeta).max()


def test_fields_are_the_same_flow_on_every_grid_and_meet_at_the_poles() -> None:
    psi = random_vorticity() * FLOW.harmonics.inverse
    poles = Harmonics(Grid("equiangular", 33, 64), 21)
    east, north = (x / np.sqrt(poles.cosine2) for x in poles.winds(psi))
    # One vector at the pole, whatever the meridian along which it is resolved.
    longitude = np.radians(poles.grid.longitudes_degrees)
    turned = (east[0] + 1j * north[0]) * np.exp(1j * longitude)
    np.testing.assert_allclose(turned, turned[0], atol=1e-3 * np.abs(east).max())
    field = poles.field(random_vorticity())
    np.testing.assert_allclose(field[0], field[0, 0], atol=1e-3 * np.abs(field).max())


def test_the_seed_decides_and_the_length_does_not() -> None:
    grid = Grid("equiangular-offset", 24, 48)
    one, again, other = DemoWeather(grid, seed=3), DemoWeather(grid, seed=3), DemoWeather(grid, seed=4)
    one.advance(12)
    again.advance(6)
    again.advance(6)
    np.testing.assert_array_equal(one.zeta, again.zeta)
    assert np.abs(one.zeta - other.zeta).max() > 0.1 * np.abs(one.zeta).max()
    fields = one.fields()
    speed = np.hypot(fields["u"], fields["v"])
    assert 20 < speed.max() < 100 and 2 < fields["v"].std() < 20
    assert fields["z"].min() / GRAVITY > 4000 and fields["z"].max() / GRAVITY < 6500
    assert 1000 < one.orography().max() < 5000


@pytest.mark.parametrize("nlat", [24, 25])
def test_netcdf_and_zarr_hold_the_same_weather(tmp_path: Path, nlat: int) -> None:
    for name in ("a.nc", "a.zarr"):
        write_demo(tmp_path / name, nlat=nlat, nlon=48, days=2, step_hours=12, seed=1)
    a, b = (open_dataset(tmp_path / name) for name in ("a.nc", "a.zarr"))
    assert a.attrs["grid"] == ("equiangular" if nlat % 2 else "equiangular-offset")
    assert a.sizes["time"] == 4 and set(np.diff(a.time.values)) == {np.timedelta64(12, "h")}
    assert set(a.data_vars) >= {"u", "v", "z", "vo"}
    xr.testing.assert_identical(a.load(), b.load())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.nc", "a.zarr"]
