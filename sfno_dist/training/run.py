"""From a configuration to a trained model: builds the parts, fits, scores, and draws."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import hydra
import lightning
from omegaconf import DictConfig, OmegaConf

from sfno_dist.data import DataError
from sfno_dist.data.datamodule import WeatherDataModule
from sfno_dist.geometry import Grid
from sfno_dist.mesh import ProcessMesh
from sfno_dist.training.checkpoint import build_model
from sfno_dist.training.module import ForecastModule

logger = logging.getLogger(__name__)
SECTIONS = ("paths", "data", "grid", "mesh", "model", "trainer", "optim", "callbacks", "logger", "name", "seed")


def train(config: DictConfig) -> dict[str, float]:
    """Trains, then scores the best checkpoint on the test period; returns the last logged metrics by name."""
    refuse_unread(config)
    # Hydra prints what is logged and keeps it in train.log; Lightning's own handlers would print it twice.
    logging.getLogger("lightning.pytorch").handlers.clear()
    ProcessMesh(**config.mesh)
    lightning.seed_everything(config.seed, workers=True, verbose=False)
    data = build_data(config)
    data.setup()
    module = build_module(config, data)
    trainer = build_trainer(config)
    weights = sum(p.numel() for p in module.parameters())
    logger.info("%s: %s, %d weights; output in %s", config.name, data.summary, weights, config.paths.output)
    trainer.fit(module, datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.test(module, datamodule=data, ckpt_path="best", weights_only=True, verbose=False)
    metrics.update({name: float(value) for name, value in trainer.callback_metrics.items()})
    return metrics


def refuse_unread(config: DictConfig) -> None:
    """A value that nothing reads is an error, so that no setting is ever silently ignored."""
    unread = [name for name in config if name not in SECTIONS]
    if unread:
        raise DataError(
            f"nothing reads the setting {', '.join(map(str, unread))}; the sections are {', '.join(SECTIONS)}"
        )


def build_data(config: DictConfig) -> WeatherDataModule:
    expected = config.grid.data
    grid = None if expected == "auto" else Grid(**expected)
    return WeatherDataModule(**_plain(config.data), grid=grid)


def build_module(config: DictConfig, data: WeatherDataModule) -> ForecastModule:
    settings = _plain(config.model)
    paths = [data.reader.paths] if isinstance(data.reader.paths, str) else list(data.reader.paths)
    return ForecastModule(
        build_model(settings, data.recipe),
        data.recipe,
        model_settings=settings,
        data_paths=[str(Path(path).absolute()) for path in paths],
        **hydra.utils.instantiate(config.optim),
    )


def build_trainer(config: DictConfig) -> lightning.Trainer:
    callbacks = [hydra.utils.instantiate(part) for part in config.callbacks.values()]
    loggers = [hydra.utils.instantiate(part) for part in config.logger.values()]
    return hydra.utils.instantiate(
        config.trainer, callbacks=callbacks, logger=loggers, default_root_dir=config.paths.output
    )


def _plain(section: DictConfig) -> dict[str, Any]:
    """As dicts, lists, strings and numbers, which a checkpoint can hold."""
    container = OmegaConf.to_container(section, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
