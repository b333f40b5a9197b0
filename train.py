"""Trains a model: ``python train.py [group=choice ...] [key=value ...]``; ``--help`` lists both."""

import os
import signal
from pathlib import Path

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # waits until training can act on it: requeue.py

import hydra  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402

ROOT = Path(__file__).resolve().parent
os.environ.setdefault("SFNO_DIST_ROOT", str(ROOT))


def run_id() -> str:
    from sfno_dist.cli import one_line_errors
    from sfno_dist.training.launch import run_id

    with one_line_errors():  # Hydra would show the traceback
        return run_id()


def on_first(value: str, elsewhere: str | None) -> str | None:
    """``value`` on the first process of the run, ``elsewhere`` on the others."""
    from sfno_dist.cli import one_line_errors
    from sfno_dist.training.launch import Processes

    with one_line_errors():
        return value if Processes.of(os.environ).rank == 0 else elsewhere


# All processes of a run share its folder, and the first of them writes its configuration and log.
OmegaConf.register_new_resolver("run_id", run_id)
OmegaConf.register_new_resolver("on_first", on_first)


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    from sfno_dist.cli import one_line_errors
    from sfno_dist.training import hydra_run
    from sfno_dist.training.run import train

    with one_line_errors():
        hydra_run.run(config, train)


if __name__ == "__main__":
    main()
