"""From a configuration to a trained model: builds the parts, fits, scores, and draws."""

from __future__ import annotations

import logging
import os
import shlex
import warnings
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from omegaconf import DictConfig

from sfno_dist.data.datamodule import WeatherDataModule
from sfno_dist.data.recipe import Recipe
from sfno_dist.geometry import Grid
from sfno_dist.mesh import ProcessMesh
from sfno_dist.training.checkpoint import build_model, model_class
from sfno_dist.training.checkpoint_io import VerifiedCheckpointIO
from sfno_dist.training.config import ConfigError, arguments, build, refuse_unread
from sfno_dist.training.launch import Processes
from sfno_dist.training.module import ForecastModule
from sfno_dist.training.plot import training_curves
from sfno_dist.training.requeue import SaveAndRequeue
from sfno_dist.training.resume import RandomState, find_checkpoint
from sfno_dist.training.strategy import GlobeStrategy

logger = logging.getLogger(__name__)


def train(config: DictConfig) -> dict[str, float]:
    """Trains, then scores the best checkpoint on the test period; returns the last logged metrics by name."""
    mesh = build_mesh(config)
    going_on_from = find_checkpoint(config.resume, config.paths.output, mesh)  # before hours of statistics
    data, module, trainer = assemble(config, mesh)
    weights = sum(p.numel() for p in module.parameters())
    logger.info("%s: %s, %d parameters; output in %s", config.name, data.summary, weights, config.paths.output)
    trainer.fit(module, datamodule=data, ckpt_path=going_on_from)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    # A run that ends before its first validation has no best checkpoint: its last weights are scored.
    trainer.test(module, datamodule=data, ckpt_path=_best(trainer) or None, verbose=False)
    metrics.update({name: float(value) for name, value in trainer.callback_metrics.items()})
    if trainer.is_global_zero:
        _draw_curves(trainer, data.recipe)
    if _best(trainer):
        logger.info(
            "forecast with: sfno-dist forecast %s --init TIME --output forecast.nc", shlex.quote(_best(trainer))
        )
    return metrics


def assemble(config: DictConfig, mesh: ProcessMesh) -> tuple[WeatherDataModule, ForecastModule, lightning.Trainer]:
    """All that trains, made alike on every process of ``mesh``."""
    _quieten()
    lightning.seed_everything(config.seed, workers=True, verbose=False)
    data = build_data(config, mesh)
    data.setup()
    return data, build_module(config, data), build_trainer(config, mesh)


def build_data(config: DictConfig, mesh: ProcessMesh | None = None) -> WeatherDataModule:
    expected = config.grid.data
    grid = None if expected == "auto" else Grid(**arguments(expected, "grid.data", Grid))
    return WeatherDataModule(
        **arguments(config.data, "data", WeatherDataModule), grid=grid, seed=config.seed, mesh=mesh
    )


def build_module(config: DictConfig, data: WeatherDataModule) -> ForecastModule:
    return module_of(config, data.recipe, [str(Path(path).absolute()) for path in data.reader.paths])


def module_of(config: DictConfig, recipe: Recipe, data_paths: list[str]) -> ForecastModule:
    settings = arguments(config.model, "model", model_class(config.model.name), beside=("name", "compile"))
    compiled = settings.pop("compile", False)
    model = build_model({**settings, "exchange": config.mesh.exchange}, recipe)
    if compiled:
        model.compile()  # in place: its weights keep their names
    return ForecastModule(
        model,
        recipe,
        model_settings=settings,
        data_paths=data_paths,
        seed=config.seed,
        **build(config.optim, "optim", _convert_="all"),
    )


def build_mesh(config: DictConfig) -> ProcessMesh:
    """``config.mesh`` of the processes at work; ``ConfigError`` for any setting of ``config`` that nothing reads."""
    refuse_unread(config)
    settings = arguments(config.mesh, "mesh", ProcessMesh, beside=("exchange",))
    return ProcessMesh(**{name: value for name, value in settings.items() if name != "exchange"})


def build_trainer(config: DictConfig, mesh: ProcessMesh) -> lightning.Trainer:
    """On the processes of ``mesh``, which launch.py has started and joined."""
    processes = Processes.of(os.environ)
    placed: dict[str, Any] = {"devices": processes.per_node, "num_nodes": processes.nodes}
    placed["plugins"] = [VerifiedCheckpointIO()]
    # Named, so that Lightning neither looks for a launcher of its own nor requeues jobs from within a signal.
    if mesh.size > 1:
        placed["strategy"] = GlobeStrategy(mesh, cluster_environment=TorchElasticEnvironment())
    else:
        placed["plugins"].append(LightningEnvironment())
    chosen = sorted({"strategy", "plugins"} & set(config.trainer))
    if chosen:
        raise ConfigError(f"trainer.{chosen[0]}: the mesh decides it; remove the setting and choose a mesh")
    callbacks = [build(part, f"callbacks.{name}") for name, part in config.callbacks.items()]
    callbacks += [RandomState(), SaveAndRequeue(f"{config.paths.output}/checkpoints/last.ckpt")]
    loggers = [build(part, f"logger.{name}") for name, part in config.logger.items()]
    folder = config.paths.output
    settings = {**placed, "callbacks": callbacks, "logger": loggers, "default_root_dir": folder}
    return build(config.trainer, "trainer", **settings)


def _quieten() -> None:
    """Leaves what the user can act on: no tips, no list of absent devices, no deprecations inside Lightning."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    # Metrics are summed over all processes before they are logged.
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
    # A computer with SLURM may also train without it.
    warnings.filterwarnings("ignore", message=".*`srun` command is available.*")
    # The DataModule resumes, not its loaders.
    warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
    # Of a resumed run, in the same folder or in a new one, whose best.ckpt is the best since then.
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    warnings.filterwarnings("ignore", message="The dirpath has changed from")


def _best(trainer: lightning.Trainer) -> str:
    """Path of the best checkpoint; empty where there is none."""
    return str(getattr(trainer.checkpoint_callback, "best_model_path", ""))


def _draw_curves(trainer: lightning.Trainer, recipe: Recipe) -> None:
    """Draws ``curves.png`` from what the CSV logger wrote, where the run has one."""
    for run_logger in trainer.loggers:
        if isinstance(run_logger, CSVLogger):
            folder = Path(str(trainer.default_root_dir))
            training_curves(Path(run_logger.log_dir) / "metrics.csv", recipe, folder / "curves.png")
