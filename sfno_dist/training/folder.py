"""The folder of a run, tried before Hydra writes to it: where it cannot be written Hydra would show a traceback."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sfno_dist.training.launch import first_to_say


class WritableFolder(Callback):
    """Makes the folder of a run, or of a sweep, and ends the command in one line where it takes no file."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        make_writable(config.hydra.run.dir, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        make_writable(config.hydra.sweep.dir, "hydra.sweep.dir")


def make_writable(folder: str | Path, setting: str) -> None:
    """``SystemExit`` with a line where ``folder`` cannot be made or written to, or its disk is full."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        line = (
            f"error: {folder}: the output cannot be written there ({error.strerror}); give another place with "
            f"{setting}=FOLDER or paths.runs=FOLDER"
        )
        sys.exit(line if first_to_say(line) else 1)
