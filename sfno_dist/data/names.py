"""What variables are called in files of different origin."""

from __future__ import annotations

import difflib
import re

from sfno_dist.data.contents import StoredField
from sfno_dist.data.errors import DataError, VariableMissingError

#: names of one quantity: ECMWF's short name, other short names, names in ARCO-ERA5 / WeatherBench2, CF standard names,
#: names in CMIP
SYNONYMS = [
    ("t", "temperature", "air_temperature", "ta"),
    ("z", "geopotential"),
    ("u", "u_component_of_wind", "eastward_wind", "ua"),
    ("v", "v_component_of_wind", "northward_wind", "va"),
    ("w", "vertical_velocity", "lagrangian_tendency_of_air_pressure", "wap"),
    ("q", "specific_humidity", "hus"),
    ("r", "relative_humidity", "hur"),
    ("t2m", "2t", "2m_temperature", "tas"),
    ("d2m", "2d", "2m_dewpoint_temperature"),
    ("gh", "geopotential_height", "zg"),
    ("u10", "10u", "u10m", "10m_u_component_of_wind", "uas"),
    ("v10", "10v", "v10m", "10m_v_component_of_wind", "vas"),
    ("u100", "100u", "u100m", "100m_u_component_of_wind"),
    ("v100", "100v", "v100m", "100m_v_component_of_wind"),
    ("msl", "mean_sea_level_pressure", "air_pressure_at_mean_sea_level", "psl"),
    ("sp", "surface_pressure", "surface_air_pressure", "ps"),
    ("sst", "sea_surface_temperature"),
    ("tp", "total_precipitation"),
    ("tcwv", "total_column_water_vapour"),
]

#: of the quantities that have one in CF's table (version 86), by ECMWF's short name
CF_NAMES = {
    "t": "air_temperature", "z": "geopotential", "u": "eastward_wind", "v": "northward_wind",
    "w": "lagrangian_tendency_of_air_pressure", "q": "specific_humidity", "r": "relative_humidity",
    "t2m": "air_temperature", "d2m": "dew_point_temperature", "gh": "geopotential_height", "u10": "eastward_wind",
    "v10": "northward_wind", "u100": "eastward_wind", "v100": "northward_wind",
    "msl": "air_pressure_at_mean_sea_level", "sp": "surface_air_pressure", "sst": "sea_surface_temperature",
    "tcwv": "atmosphere_mass_content_of_water_vapor",
}  # fmt: skip


def cf_attributes(name: str) -> dict[str, str]:
    """``long_name`` of a variable such as ``t2m`` or ``z500`` and, where CF has one, ``standard_name``."""
    base, level = level_of(name) or (name, None)
    quantity = quantity_of(base, {})
    group = next((names for names in SYNONYMS if names[0] == quantity), (base, base))
    long_name = next((spelt for spelt in group if "_" in spelt), group[1]).replace("_", " ")
    attributes = {"long_name": f"{long_name} at {level} hPa" if level else long_name}
    return attributes | ({"standard_name": CF_NAMES[quantity]} if quantity in CF_NAMES else {})


def quantity_of(name: str, attributes: dict) -> str | None:
    """The short name (ECMWF) of a known quantity, by a field's name or its CF standard name; None for others."""
    for key in (name.lower(), str(attributes.get("standard_name", ""))):
        for group in SYNONYMS:
            if key in group:
                return group[0]
    return None


def find_variable(fields: dict[str, StoredField], wanted: str, path: str) -> tuple[str, int | None]:
    """(name in the file, index of the pressure level or None) of a wanted variable such as ``t2m`` or ``z500``.

    By the exact name, then whatever the case, then by synonyms, then by CF standard name; then as a variable followed
    by a pressure in hPa, which is a name of its own (``z_500``) or has pressure levels (``u10`` is never ``u`` at
    10 hPa). ``DataError`` lists what the file holds, or the variables among which the name does not decide.
    """
    names = list(fields)
    name = _by_name(fields, names, wanted, path)
    if name is not None:
        return name, None
    split = level_of(wanted)
    if split:
        same = [x for x in names if (parts := level_of(x)) and parts[1] == split[1]]
        bases = {x: level_of(x)[0] for x in same}  # type: ignore[index]
        found = [x for x in same if bases[x].lower() in _synonyms(split[0])]
        if len(found) == 1:
            return found[0], None
        name = _by_name(fields, [x for x in names if fields[x].levels], split[0], path)
        if name is not None:
            return name, _level_index(fields[name], name, split[1], wanted, path)
    close = difflib.get_close_matches(wanted, names, n=2)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    shown = ", ".join(names[:60]) + (" ..." if len(names) > 60 else "")
    raise VariableMissingError(f"{path}: no variable {wanted}{hint}; the file holds {shown or 'no fields'}")


def level_of(name: str) -> tuple[str, int] | None:
    """(variable, pressure in hPa) that a name such as ``z500`` or ``z_500`` joins; None for ``t2m`` or ``u10``."""
    found = re.fullmatch(r"(.*?[^\d_])_?(\d+)", name)
    return None if found is None or any(name.lower() in group for group in SYNONYMS) else (found[1], int(found[2]))


def _synonyms(name: str) -> tuple[str, ...]:
    return next((group for group in SYNONYMS if name.lower() in group), (name.lower(),))


def _by_name(fields: dict[str, StoredField], names: list[str], wanted: str, path: str) -> str | None:
    synonyms = _synonyms(wanted)
    tests = (
        lambda name: name == wanted,
        lambda name: name.lower() == wanted.lower(),
        lambda name: name.lower() in synonyms,
        lambda name: fields[name].attributes.get("standard_name") in synonyms,
    )
    for test in tests:
        found = [name for name in names if test(name)]
        if len(found) > 1:
            raise DataError(f"{path}: {wanted} may be {' or '.join(found)}; ask for one by its name in the file")
        if found:
            return found[0]
    return None


def _level_index(field: StoredField, name: str, wanted_hpa: int, wanted: str, path: str) -> int | None:
    found = [i for i, level in enumerate(field.levels) if abs(level - wanted_hpa) <= 1e-4 * wanted_hpa]
    if not found:
        held = ", ".join(f"{x:g}" for x in field.levels)
        raise DataError(f"{path}: {wanted} asks for {name} at {wanted_hpa} hPa; the file has {held} hPa")
    if len(found) > 1:
        raise DataError(f"{path}: {name} has the level {wanted_hpa} hPa {len(found)} times; mend the file")
    return found[0] if field.level_dim else None
