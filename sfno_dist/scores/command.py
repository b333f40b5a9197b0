"""``sfno-dist score FORECAST TRUTH``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sfno_dist.data import DataError
from sfno_dist.data.checks import files
from sfno_dist.data.output import whole_or_nothing
from sfno_dist.scores.climatology import FileClimatology, PeriodClimatology
from sfno_dist.scores.forecasts import Forecasts
from sfno_dist.scores.page import page
from sfno_dist.scores.plan import Climatology
from sfno_dist.scores.table import table
from sfno_dist.scores.truth import Truth
from sfno_dist.scores.verify import verify


def score(
    forecast: str,
    truth: Sequence[str],
    *,
    climatology: str | None = None,
    variables: Sequence[str] | None = None,
    output: str | None = None,
    report: str | None = None,
) -> str:
    """Scores as a table; written as netCDF to ``output`` and as a page to ``report`` where they are named.

    ``forecast`` is a file, zarr folder or glob; ``climatology`` a period of the truth such as ``1982:1989``, or a file.
    Raises ``DataError`` for files that do not fit each other, before anything is written.
    """
    file = climatology if climatology and os.path.exists(climatology) else None
    for path in filter(None, (output, report)):
        _check_output(Path(path), files([forecast, *truth, *filter(None, [file])]))
    forecasts = Forecasts(forecast, variables)
    observed = Truth(truth, forecasts)
    result = verify(forecasts, observed, _climatology(climatology, forecasts, observed))
    if output:
        encoding = {name: {"zlib": True, "complevel": 4} for name in result.data_vars}
        _write(Path(output), lambda partial: result.to_netcdf(partial, encoding=encoding))
    if report:
        _write(Path(report), lambda partial: partial.write_text(page(result), encoding="utf-8"))
    return table(result)


def _climatology(text: str | None, forecasts: Forecasts, truth: Truth) -> Climatology | None:
    if text is None:
        return None
    if os.path.exists(text):
        return FileClimatology(text, forecasts)
    first, colon, last = text.partition(":")
    if not colon:
        raise DataError(f"--climatology: a period reads like 1982:1989, and there is no file {text!r}")
    names = [variable.name for variable in forecasts.variables]
    return PeriodClimatology(truth, names, first, last, np.array([place.valid for place in forecasts.places]))


def _check_output(path: Path, sources: Sequence[str]) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise DataError(f"{path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}; name a file")
    if path.exists() and any(path.samefile(source) for source in sources):
        raise DataError(f"{path}: is a file that is scored; choose another output")


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        with whole_or_nothing(path, overwrite=True) as partial:
            write(partial)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
