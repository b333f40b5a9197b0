"""A callback that writes down each step of each process, which take unequally long."""

import os
import time
from pathlib import Path

import lightning


class Diary(lightning.Callback):
    """Lines ``restart rank step process`` in a file for each rank."""

    def __init__(self, folder: str, skew_s: float = 0.0) -> None:
        self.folder, self.skew_s = Path(folder), skew_s

    def on_train_batch_start(self, trainer, *_) -> None:
        rank = trainer.global_rank
        time.sleep(self.skew_s * rank)
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        with (self.folder / f"steps-{rank}.txt").open("a") as file:
            print(restart, rank, trainer.global_step, os.getpid(), file=file)
