"""Checkpoints that are whole and read back before they replace the one before.

A checkpoint is a zip archive, so every part carries a checksum that PyTorch took of what was in memory; ``torch.load``
itself does not look at it.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from sfno_dist.data.output import whole_or_nothing
from sfno_dist.training.checkpoint import CheckpointError

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"  # files of one folder; the second is the first of one save ago


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, reads it back from the disk, and only then gives it its name.

    A process killed at any moment, a full disk and a disk that loses what it took leave the checkpoint of before.
    ``last.ckpt`` is also kept as ``previous.ckpt`` until the next one, so the disk needs room for three of them.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """``CheckpointError``, one line, where it cannot be written whole."""
        path = Path(path).absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for leftover in path.parent.glob(".*.ckpt.*.partial"):  # of processes killed while they wrote
                leftover.unlink(missing_ok=True)
            with whole_or_nothing(path, overwrite=True) as partial:
                _write(checkpoint, partial)
                problem = damage(partial)
                if problem is not None:
                    raise OSError(f"what was read back is not what was written: {problem}")
                if path.name == LAST and path.exists():
                    os.replace(path, path.with_name(PREVIOUS))
            _to_disk(path.parent)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: the checkpoint cannot be written ({_cause(error)}); {_left(path)}"
            ) from error


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint file, in a few words; None where every checksum in it is right."""
    try:
        with zipfile.ZipFile(path) as archive:
            part = archive.testzip()
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        return "truncated, or not a checkpoint" if isinstance(error, zipfile.BadZipFile) else str(error)
    return None if part is None else f"wrong checksum of {part}"


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
        _forget(file)


def _forget(file: IO[bytes]) -> None:
    """Lets the system drop its copy in memory, so that the reading back reads the disk; only where it can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _to_disk(folder: Path) -> None:
    """Renames in a folder outlive a loss of power once the folder itself is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cause(error: BaseException) -> str:
    """The system's words: PyTorch's writer covers them with an assertion of its own."""
    below: BaseException | None = error
    while below is not None and not isinstance(below, OSError):
        below = below.__cause__ or below.__context__
    found = below or error
    return getattr(found, "strerror", None) or (str(found).splitlines() or [type(found).__name__])[0]


def _left(path: Path) -> str:
    kept = path if path.exists() else path.with_name(PREVIOUS)
    return f"the one before is whole, {kept}" if kept.exists() else "there is none before it"
