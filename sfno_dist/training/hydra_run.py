"""A training on every process of ``config.mesh``: how many that takes, and the command that each of them runs."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from sfno_dist.training.config import ConfigError
from sfno_dist.training.launch import Processes, end_with_the_command, joined, layouts, refuse_other_size, start

OF_SWEEPS = ("hydra.mode", "hydra.sweep", "hydra/sweeper", "hydra.launcher", "hydra/launcher")


def run(config: DictConfig, train: Callable[[DictConfig], Any]) -> None:
    """``train(config)`` on every process of ``config.mesh``, starting them on this machine where nothing else did.

    ``ConfigError`` where the number of processes is not that of the mesh, before anything starts.
    """
    end_with_the_command()
    processes = Processes.of(os.environ)
    size = wanted(config, processes)
    if processes.size > 1 and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError("the runs of a sweep (-m) start their own processes: python train.py -m, without a launcher")
    if size > processes.size:
        start(size, _command())
        return
    on_gpu = config.trainer.accelerator in ("gpu", "cuda")
    with joined(processes, on_gpu=on_gpu, timeout_s=config.mesh.timeout_s):
        train(config)


def wanted(config: DictConfig, processes: Processes) -> int:
    """Number of processes that the mesh needs; ``ConfigError`` where what was started or asked for is another."""
    axes = {axis: config.mesh[axis] for axis in ("data", "polar", "azimuth")}
    for axis, count in axes.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"mesh.{axis} must be a whole number of at least 1, got {count!r}")
    _refuse_empty_tiles(config)
    size = math.prod(axes.values())
    layout = " x ".join(map(str, axes.values()))
    refuse_other_size(tuple(axes.values()), processes)
    devices, nodes = config.trainer.devices, config.trainer.num_nodes
    per_node = processes.per_node if processes.size > 1 else size
    for name, value, there in (("devices", devices, per_node), ("num_nodes", nodes, size // per_node)):
        if value not in ("auto", there):
            many = value * (1 if nodes == "auto" else nodes) if name == "devices" and isinstance(value, int) else 0
            fit = f"; {many} processes make {layouts(many)}" if many > 1 else ""
            raise ConfigError(
                f"trainer.{name}={value}, but the mesh of {layout} = {size} processes (data x polar x azimuth) has "
                f"{there} {'on each node' if name == 'devices' else 'here'}; leave it at auto{fit}"
            )
    return size


def _refuse_empty_tiles(config: DictConfig) -> None:
    """Before a mistyped mesh starts hundreds of processes; the grid of the data is checked once they are open."""
    for grid in ("latent", "data"):
        for axis, side, lines in (("polar", "nlat", "rows"), ("azimuth", "nlon", "columns")):
            parts, count = config.mesh[axis], OmegaConf.select(config, f"grid.{grid}.{side}")
            if isinstance(count, int) and parts > count:
                raise ConfigError(
                    f"mesh.{axis}={parts}, but grid.{grid} has only {count} {lines} to share out; lower mesh.{axis}"
                )


def _command() -> list[str]:
    """This command again, into the folder of this run; of a sweep the one run that is now its turn."""
    hydra = HydraConfig.get()
    words = sys.argv[1:]
    if hydra.mode == RunMode.MULTIRUN:
        options = {"main": "--config-path", "command-line": "--config-dir"}
        words = [f"--config-name={hydra.job.config_name}"]
        words += [f"{options[at.provider]}={at.path}" for at in hydra.runtime.config_sources if at.provider in options]
        words += [word for word in hydra.overrides.hydra if not word.lstrip("+~").startswith(OF_SWEEPS)]
        words += hydra.overrides.task
    script = os.path.join(hydra.runtime.cwd, sys.argv[0])  # also where hydra.job.chdir has left that folder
    return [script, *words, f"hydra.run.dir={_quoted(hydra.runtime.output_dir)}"]


def _quoted(text: str) -> str:
    """As a value of Hydra, which takes a backslash as it is unless a quote follows."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), text) + "'"
