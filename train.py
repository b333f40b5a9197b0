"""Trains a model: ``python train.py [group=choice ...] [key=value ...]``; ``--help`` lists both."""

import os
from pathlib import Path

import hydra
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parent
os.environ.setdefault("SFNO_DIST_ROOT", str(ROOT))


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    from sfno_dist.cli import one_line_errors
    from sfno_dist.training.run import train

    with one_line_errors():
        train(config)


if __name__ == "__main__":
    main()
