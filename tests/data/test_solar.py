"""The sun against published values."""

import numpy as np
import pytest

from sfno_dist import Grid
from sfno_dist.data.solar import cos_zenith, day_phase, year_phase

GRID = Grid("equiangular", 181, 360)


def subsolar_point(time: str) -> tuple[float, float]:
    """Latitude and longitude in degrees where the sun stands highest."""
    field = cos_zenith(np.datetime64(time), GRID)
    row, column = np.unravel_index(np.argmax(field), field.shape)
    return GRID.latitudes_degrees[row], GRID.longitudes_degrees[column]


@pytest.mark.parametrize(
    ("time", "declination"),
    [  # The Astronomical Almanac: equinoxes and solstices of 2020 and 2021
        ("2020-03-20T03:50", 0.0),
        ("2020-06-20T21:44", 23.44),
        ("2020-09-22T13:31", 0.0),
        ("2021-12-21T15:59", -23.44),
    ],
)
def test_declination_at_equinoxes_and_solstices(time, declination):
    assert subsolar_point(time)[0] == pytest.approx(declination, abs=1.0)
    # At the poles the zenith distance is the complement of the declination.
    assert cos_zenith(np.datetime64(time), GRID)[0, 0] == pytest.approx(np.sin(np.radians(declination)), abs=2e-4)


@pytest.mark.parametrize(
    ("time", "minutes"),
    [  # Equation of time: 11 February -14.2 min, 3 November +16.4 min (US Naval Observatory)
        ("2019-02-11T12:00", -14.2),
        ("2019-11-03T12:00", 16.4),
    ],
)
def test_equation_of_time(time, minutes):
    fine = Grid("equiangular", 3, 7200)
    noon = fine.longitudes_degrees[np.argmax(cos_zenith(np.datetime64(time), fine)[1])]
    assert (noon + 180.0) % 360.0 - 180.0 == pytest.approx(-minutes / 4.0, abs=0.06)  # 4 minutes a degree


def test_zenith_angle_of_a_published_example():
    # Golden, Colorado (39.742 N, 105.18 W), 2003-10-17 12:30:30 local (UTC-7): zenith 50.11 degrees
    # (I. Reda and A. Andreas, NREL/TP-560-34302, table A5.1).
    lat, lon = 39.742476, 254.8214
    fine = Grid("equiangular", 1801, 3600)
    field = cos_zenith(np.datetime64("2003-10-17T19:30:30"), fine)
    row = int(np.argmin(np.abs(fine.latitudes_degrees - lat)))
    column = int(np.argmin(np.abs(fine.longitudes_degrees - lon)))
    assert np.degrees(np.arccos(field[row, column])) == pytest.approx(
        50.11, abs=0.06
    )  # the points are 0.1 degrees apart


def test_half_of_the_globe_is_lit():
    grid = Grid("legendre-gauss", 60, 120)
    mean = (cos_zenith(np.datetime64("2020-05-05T09"), grid) * grid.cell_areas[:, None]).sum()
    assert mean == pytest.approx(0.0, abs=1e-6)


def test_year_phase_turns_once_a_year():
    assert year_phase(np.datetime64("2019-01-01")) == 0.0
    assert year_phase(np.datetime64("2019-07-02T12")) == pytest.approx(np.pi)
    assert year_phase(np.datetime64("2020-07-02")) == pytest.approx(np.pi)  # of a leap year
    assert year_phase(np.datetime64("2019-12-31T23:59")) < 2 * np.pi


@pytest.mark.parametrize(
    ("lat", "lon", "zenith"), [(-7.78507, 176.5795, 0.0), (82.21493, 176.5795, 90.0), (7.78507, 356.5795, 180.0)]
)
def test_the_place_of_the_sun_of_a_published_example(lat, lon, zenith):
    """J. Meeus, Astronomical Algorithms (1998), example 25.a, 1992-10-13T00: right ascension 198.38083 degrees,
    declination -7.78507; sidereal time at Greenwich 21.80134 degrees (his formula 12.4)."""
    latitudes = tuple(sorted((lat, -85.0 if lat > 0 else 85.0), reverse=True))
    grid = Grid("irregular", 2, 3600, irregular_latitudes=latitudes)
    place = latitudes.index(lat), int(np.argmin(np.abs(grid.longitudes_degrees - lon)))
    cosine = cos_zenith(np.datetime64("1992-10-13", "ns"), grid)[place]
    assert np.degrees(np.arccos(np.clip(cosine, -1, 1))) == pytest.approx(zenith, abs=0.05)  # points 0.1 apart


def test_a_tile_has_its_part_of_the_field():
    time = np.datetime64("2003-10-17T19:30:30", "ns")
    whole, rows, columns = cos_zenith(time, GRID), slice(31, 77), slice(5, 9)
    assert np.array_equal(cos_zenith(time, GRID, rows=rows, columns=columns), whole[rows, columns])


def test_the_phase_of_the_day_is_local_time():
    time = np.datetime64("2020-05-05T18:00", "ns")
    hours = day_phase(time, np.radians([0.0, 90.0, 180.0])) / (2 * np.pi) * 24 % 24
    np.testing.assert_allclose(hours, [18.0, 0.0, 6.0], atol=1e-9)
