"""Where the sun stands."""

from __future__ import annotations

import numpy as np

from sfno_dist.geometry import Grid


def year_phase(time: np.datetime64) -> float:
    """Angle of the time within its calendar year, 0 at its first instant, in radians [0, 2 pi)."""
    year = time.astype("datetime64[Y]")
    start, end = (x.astype("datetime64[ns]") for x in (year, year + 1))
    return float(2.0 * np.pi * ((time - start) / (end - start)))


def day_phase(time: np.datetime64, longitudes: np.ndarray) -> np.ndarray:
    """Angle of the local mean solar time within the day, 0 at local midnight, in radians   [longitudes]"""
    share = (time - time.astype("datetime64[D]")) / np.timedelta64(1, "D")
    return 2.0 * np.pi * share + longitudes


def cos_zenith(
    time: np.datetime64, grid: Grid, *, rows: slice = slice(None), columns: slice = slice(None)
) -> np.ndarray:
    """Cosine of the solar zenith angle at a UTC time, negative at night, on a tile   [rows, columns] float64

    Low-precision solar coordinates and sidereal time of the Astronomical Almanac (page C5; also J. Michalsky,
    Solar Energy 40, 1988): within 0.01 degrees from 1950 to 2050.
    """
    days = (time - np.datetime64("2000-01-01T12:00")) / np.timedelta64(1, "D")
    mean_longitude = np.radians(280.460 + 0.9856474 * days)
    anomaly = np.radians(357.528 + 0.9856003 * days)
    ecliptic_longitude = mean_longitude + np.radians(1.915 * np.sin(anomaly) + 0.020 * np.sin(2.0 * anomaly))
    obliquity = np.radians(23.439 - 4e-7 * days)
    declination = np.arcsin(np.sin(obliquity) * np.sin(ecliptic_longitude))
    right_ascension = np.arctan2(np.cos(obliquity) * np.sin(ecliptic_longitude), np.cos(ecliptic_longitude))
    sidereal_time = np.radians(15.0 * (18.697374558 + 24.06570982441908 * days))  # at Greenwich
    hour_angle = sidereal_time - right_ascension + grid.longitudes[None, columns]
    colatitude = grid.colatitudes[rows, None]
    return np.cos(colatitude) * np.sin(declination) + np.sin(colatitude) * np.cos(declination) * np.cos(hour_angle)
