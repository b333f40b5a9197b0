"""Units that are written differently and mean the same, and values that do not fit their units."""

from __future__ import annotations

import math
import re

ALIASES = {
    "kelvin": "K", "degk": "K", "deg_k": "K", "k": "K", "degrees_kelvin": "K", "degree_kelvin": "K",
    "c": "degC", "degc": "degC", "deg_c": "degC", "celsius": "degC", "degree_celsius": "degC",
    "degrees_celsius": "degC", "°c": "degC", "degree_c": "degC", "degrees_c": "degC", "degreec": "degC",
    "meter": "m", "meters": "m", "metre": "m", "metres": "m", "m": "m",
    "second": "s", "seconds": "s", "sec": "s", "s": "s",
    "pascal": "Pa", "pascals": "Pa", "pa": "Pa", "hpa": "hPa", "hectopascal": "hPa", "hectopascals": "hPa",
    "mb": "hPa", "mbar": "hPa", "millibar": "hPa", "millibars": "hPa",
    "kg": "kg", "kilogram": "kg", "kilograms": "kg", "j": "J", "joule": "J", "joules": "J", "w": "W", "watt": "W",
    "watts": "W", "percent": "%", "%": "%", "gpm": "m", "hr": "h", "hour": "h", "hours": "h", "day": "d", "days": "d",
}  # fmt: skip
DIMENSIONLESS = ("1", "(0 - 1)", "0-1", "0 - 1", "dimensionless", "fraction", "unitless", "proportion", "none")


def meaning(unit: str) -> tuple[tuple[str, int], ...] | None:
    """Base units and their exponents, alike for all spellings of a unit; None where none is given.

    ``m s-1``, ``m s**-1``, ``m/s`` and ``M/S`` are alike; ``kg kg-1`` is dimensionless.
    """
    text = unit.strip()
    if not text:
        return None
    if text.lower() in DIMENSIONLESS:
        return ()
    exponents: dict[str, int] = {}
    sign = 1
    text = re.sub(r"(?i)\bdeg(?:ree)?s?[ _]+(?=k\b|c\b|kelvin|celsius)", "", text)  # "degrees K"
    for part in re.findall(r"/|[^\s/*.^·]+(?:(?:\*\*|\^)[-+]?\d+)?", text.replace("**", "^")):
        if part == "/":
            sign = -1
            continue
        found = re.fullmatch(r"(.*?)\^?([-+]?\d+)?", part)
        name, power = (found[1], int(found[2] or 1)) if found else (part, 1)
        name = ALIASES.get(name.lower(), name)
        if name and name != "1":
            exponents[name] = exponents.get(name, 0) + sign * power
        # After "/" as in m/s/s every factor divides until the text ends; "m/s2 kg" is not written in practice.
    return tuple(sorted((name, power) for name, power in exponents.items() if power))


def same_units(a: str, b: str) -> bool:
    """Whether two units mean the same, however they are spelled; none given equals none given only."""
    return meaning(a) == meaning(b)


_KELVIN = {"K": (1.0, 0.0), "degC": (1.0, -273.15)}
_PRESSURE = {"Pa": (1.0, 0.0), "hPa": (0.01, 0.0)}
_SPEED = {"m s-1": (1.0, 0.0), "km h-1": (3.6, 0.0)}
#: quantity -> (lowest and highest plausible value in its first unit, unit -> (factor, offset) from the first)
PLAUSIBLE: dict[str, tuple[float, float, dict[str, tuple[float, float]]]] = {
    "t": (140.0, 360.0, _KELVIN),
    "t2m": (160.0, 345.0, _KELVIN),
    "d2m": (130.0, 320.0, _KELVIN),
    "sst": (260.0, 325.0, _KELVIN),
    "z": (-1e4, 6e5, {"m2 s-2": (1.0, 0.0), "m": (1 / 9.80665, 0.0)}),
    "gh": (-1000.0, 6e4, {"m": (1.0, 0.0), "m2 s-2": (9.80665, 0.0)}),
    "u": (-200.0, 200.0, _SPEED),
    "v": (-200.0, 200.0, _SPEED),
    "w": (-100.0, 100.0, {"Pa s-1": (1.0, 0.0)}),
    "u10": (-110.0, 110.0, _SPEED),
    "v10": (-110.0, 110.0, _SPEED),
    "u100": (-130.0, 130.0, _SPEED),
    "v100": (-130.0, 130.0, _SPEED),
    "msl": (85e3, 110e3, _PRESSURE),
    "sp": (40e3, 115e3, _PRESSURE),
    "q": (-1e-3, 0.06, {"1": (1.0, 0.0), "g kg-1": (1000.0, 0.0)}),
    "r": (-30.0, 200.0, {"%": (1.0, 0.0), "1": (0.01, 0.0)}),
    "tp": (-1e-3, 3.0, {"m": (1.0, 0.0), "mm": (1000.0, 0.0), "kg m-2": (1000.0, 0.0)}),
    "tcwv": (-1.0, 150.0, {"kg m-2": (1.0, 0.0)}),
}


def implausible(quantity: str, unit: str, low: float, high: float, level: float | None) -> str | None:
    """What is odd about values ``low`` .. ``high`` of a known quantity (ECMWF short name), None where nothing is."""
    rule = PLAUSIBLE.get(quantity)
    if rule is None:
        return None
    least, most, units = rule
    if quantity in ("z", "gh") and level is not None and level <= 925.0:
        least, most = _heights(quantity, level)
    for known, (factor, offset) in units.items():
        if same_units(known, unit):
            least, most = least * factor + offset, most * factor + offset
            if least <= low and high <= most:
                return None
            return f"values {low:g}..{high:g} in {unit!r}, where {least:g}..{most:g} is plausible"
    return None


def _heights(quantity: str, level: float) -> tuple[float, float]:
    """Plausible range at a pressure level (hPa): half and twice the height of an isothermal atmosphere at 250 K."""
    height = 7320.0 * math.log(1013.25 / level)
    factor = 9.80665 if quantity == "z" else 1.0
    return (0.5 * height - 800.0) * factor, (1.6 * height + 800.0) * factor
