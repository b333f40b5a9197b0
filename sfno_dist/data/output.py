"""Files and folders that are whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sfno_dist.data.errors import DataError


def check_output(target: Path) -> None:
    """``DataError`` where something is there already, or no folder to make it in."""
    if os.path.lexists(target):
        raise DataError(f"{target}: exists already; name another output or remove it first")
    if not target.absolute().parent.is_dir():
        raise DataError(f"{target}: the folder {target.absolute().parent} does not exist; make it first")


@contextmanager
def whole_or_nothing(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden name beside ``target``: what is made there takes its name at the end, or vanishes with an error."""
    partial = target.absolute().parent / f".{target.name}.{os.getpid()}.partial"
    try:
        yield partial
        if not overwrite:
            check_output(target)  # once more: someone else may have made it meanwhile
        os.replace(partial, target)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
