"""Values outside ``valid_range``, or beyond ``valid_min`` or ``valid_max``, are missing in CF."""

from __future__ import annotations

from typing import Any

import numpy as np


def valid_limits(
    attributes: dict, stored: np.dtype, decoded: np.dtype, *, scale: float | None, offset: float | None
) -> tuple[float, float] | None:
    """Lowest and highest valid value, decoded; None where none is named, or a range that holds nothing.

    ``stored`` is the type of the numbers in the file, ``decoded`` that of the values, ``scale`` and ``offset`` are None
    where they are the same. Whole limits of packed numbers count as those numbers do, others are in the units of the
    values (CF conventions 1.11, section 2.5.1).
    """
    low, high = _limit(attributes, "valid_min", 0, -np.inf), _limit(attributes, "valid_max", 1, np.inf)
    if not low < high or not (np.isfinite(low) or np.isfinite(high)):
        return None
    if scale is None and offset is None:
        # A limit in double precision is that of values in single precision once it is rounded as they are.
        kind = decoded if decoded.kind == "f" else np.dtype(float)
        return float(np.asarray(low).astype(kind)), float(np.asarray(high).astype(kind))
    step, start = (1.0 if scale is None else float(scale)), (0.0 if offset is None else float(offset))
    ends = []
    for limit in (low, high):
        number = np.asarray(limit)
        if number.dtype.kind in "iu":
            ends.append(float(number.astype(stored)) * step + start)
        else:
            ends.append(float(number) if np.isfinite(number) else float(number) * np.sign(step))
    # Half a step of the packing wider: limits are not rounded as packed values are.
    return min(ends) - abs(step) / 2, max(ends) + abs(step) / 2


def _limit(attributes: dict, name: str, place: int, otherwise: float) -> Any:
    pair = np.ravel(attributes.get("valid_range", ()))
    value = np.ravel(attributes.get(name, pair[place : place + 1] if pair.size == 2 else ()))
    if value.size != 1 or value.dtype.kind not in "iuf" or value[0] != value[0]:
        return otherwise
    return value[0]
