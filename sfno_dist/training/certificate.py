"""The certificate of a layout: the same steps of training on one process and on the layout, number by number.

In float64, where what remains of rounding is far below any fault (the weights of samples stay float32). Every weight
starts a little off its initial value, so that none that starts at zero hides the gradient of those before it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.multiprocessing
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from sfno_dist.training import launch
from sfno_dist.training.compose import compose_training
from sfno_dist.training.config import ConfigError
from sfno_dist.training.hydra_run import wanted
from sfno_dist.training.run import assemble, build_mesh

PERTURBATION = 0.05  # standard deviation of what is added to each weight at the start
# A parameter's differences are relative to its largest value, or to this share of the largest of all where it is more:
# a gradient that is zero but for rounding has no scale of its own.
FLOOR = 1e-2
OF_TRAINING = {
    "trainer.accelerator": "cpu", "trainer.precision": "64-true", "trainer.max_epochs": -1,
    "trainer.num_sanity_val_steps": 0, "trainer.limit_val_batches": 0, "trainer.enable_progress_bar": False,
    "trainer.enable_checkpointing": False, "callbacks": {}, "logger": {}, "resume": None,
}  # fmt: skip


class LayoutError(ValueError):
    """A layout that changes the training. Names the first parameter that differs."""


@dataclass
class Step:
    """One step of the optimiser: the loss's share of this process, the gradients before clipping, the weights after."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass
class StepDifferences:
    """Of one step, the largest of all processes; ``gradients`` and ``weights`` by parameter, relative."""

    losses: tuple[float, float]
    norms: tuple[float, float]
    gradients: dict[str, float]
    weights: dict[str, float]


@dataclass
class Certificate:
    """What ``verify`` found; ``steps`` compare one process (first of each pair) with the layout."""

    layout: str
    tolerance: float
    steps: list[StepDifferences]

    @property
    def fault(self) -> str | None:
        """The first parameter beyond the tolerance, in words, in the order of steps and of the model."""
        for number, step in enumerate(self.steps, 1):
            found = {"gradient of": step.gradients, "weight": step.weights}
            beyond = [(kind, n, x) for kind, of in found.items() for n, x in of.items() if x > self.tolerance]
            scalars = {"loss": _relative(*step.losses), "gradient norm": _relative(*step.norms)}
            others = [f"the {name} by {x:.1e}" for name, x in scalars.items() if x > self.tolerance]
            if beyond or others:
                kind, name, x = beyond[0] if beyond else ("", "", 0.0)
                first = [f"the {kind} {name} differs by {x:.1e}"] if beyond else []
                more = [f"{len(beyond) - 1} others too"] if len(beyond) > 1 else []
                what = ", ".join(first + more + others)
                return (
                    f"the layout {self.layout} changes the training: at step {number} {what} "
                    f"(relative; tolerance {self.tolerance:g})"
                )
        return None

    def table(self) -> str:
        """Loss and gradient norm by step, then the relative differences of each parameter by step."""
        lines = [
            f"{self.layout} against one process, float64, relative differences (tolerance {self.tolerance:g})",
            f"{'step':<6}{'loss':>14}{'difference':>12}{'gradient norm':>16}{'difference':>12}",
        ]
        for number, step in enumerate(self.steps, 1):
            (loss, other_loss), (norm, other_norm) = step.losses, step.norms
            loss_text = f"{other_loss:>14.8g}{_relative(loss, other_loss):>12.1e}"
            lines.append(f"{number:<6}{loss_text}{other_norm:>16.8g}{_relative(norm, other_norm):>12.1e}")
        names = list(self.steps[0].weights)
        width = max(map(len, [*names, "parameter"])) + 2
        numbers = range(1, len(self.steps) + 1)
        heads = [f"{'gradient ' + str(n):>12}" for n in numbers] + [f"{'weight ' + str(n):>12}" for n in numbers]
        lines += ["", f"{'parameter':<{width}}{''.join(heads)}"]
        for name in names:
            values = [step.gradients.get(name) for step in self.steps] + [step.weights[name] for step in self.steps]
            cells = ("frozen" if x is None else f"{x:.1e}" for x in values)
            lines.append(f"{name:<{width}}{''.join(f'{cell:>12}' for cell in cells)}")
        everything = [x for step in self.steps for of in (step.gradients, step.weights) for x in of.values()]
        return "\n".join([*lines, "", f"largest relative difference of a parameter: {max(everything):.1e}"])


def verify(
    overrides: Sequence[str],
    *,
    steps: int = 3,
    tolerance: float = 1e-6,
    in_each_process: Callable[[], None] | None = None,
) -> Certificate:
    """Trains ``steps`` steps on one process and on the layout that ``overrides`` of conf/train.yaml ask for.

    Starts the processes itself, on this machine's CPU. ``in_each_process`` runs in those of the layout before all else.
    ``ValueError`` for a configuration that cannot be trained.
    """
    if steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}")
    if not 0.0 < tolerance < 1.0:
        raise ConfigError(f"--tolerance is a relative difference between 0 and 1, got {tolerance:g}")
    with TemporaryDirectory(prefix="verify-layout-") as folder:
        config = composed(overrides, Path(folder), steps)
        alone = config.copy()
        alone.mesh.data = alone.mesh.polar = alone.mesh.azimuth = 1
        size = wanted(config, launch.Processes())
        if size == 1:
            raise ConfigError("the mesh has one process, so there is nothing to compare; give mesh=polar2_azimuth2")
        _start(1, alone, folder, None)
        _start(size, config, folder, in_each_process)
        parts = [torch.load(_file(folder, size, rank), weights_only=False) for rank in range(size)]
    axes = [config.mesh[axis] for axis in ("data", "polar", "azimuth")]
    layout = f"data x polar x azimuth = {' x '.join(map(str, axes))}"
    return Certificate(layout, tolerance, [_together(step, axes[0]) for step in zip(*parts, strict=True)])


def composed(overrides: Sequence[str], folder: Path, steps: int) -> DictConfig:
    """The configuration that ``train.py`` would have, with what the certificate decides itself."""
    for key in (word.partition("=")[0].lstrip("+~") for word in overrides):
        if key in {*OF_TRAINING, "trainer.max_steps"} or key.startswith(("callbacks.", "logger.")):
            raise ConfigError(f"verify-layout decides {key} itself; leave it out")
    decided = {**OF_TRAINING, "trainer.max_steps": steps}
    return compose_training([*overrides, f"paths.output='{folder}'", "name=verify-layout"], decided)


def _start(size: int, config: DictConfig, folder: str, prepare: Callable[[], None] | None) -> None:
    """``_process`` as each of ``size`` processes; ``ValueError`` with what the first that failed said."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives all of them
    environment = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "SFNO_DIST_ROOT": os.environ["SFNO_DIST_ROOT"],
    }  # fmt: skip
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["sfno_dist.training.certificate"])
    arguments = (OmegaConf.to_container(config), folder, environment, prepare)
    try:
        torch.multiprocessing.start_processes(_process, arguments, size, start_method="forkserver")
    except (ProcessRaisedException, ProcessExitedException) as error:
        where = f"process {error.error_index} of {size}"
        line = [line for line in str(error).splitlines() if line.strip()][-1]
        raise ValueError(f"{where}: {line.split('Error: ', 1)[-1]}") from error


def _process(rank: int, settings: dict, folder: str, environment: dict, prepare: Callable[[], None] | None) -> None:
    """Trains; one process alone leaves its numbers, one of several how its own differ from those."""
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    processes, config = launch.Processes.of(os.environ), OmegaConf.create(settings)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes.size))
    warnings.filterwarnings("ignore")  # of training, not of its certificate
    if prepare is not None:
        prepare()
    with launch.joined(processes, on_gpu=False, timeout_s=config.mesh.timeout_s):
        data, module, trainer = assemble(config, build_mesh(config))
        _perturb(module, config.seed)
        recorder = Recorder()
        trainer.callbacks.append(recorder)  # type: ignore[attr-defined]
        trainer.fit(module, datamodule=data)
    found: Any = recorder.steps
    if processes.size > 1:
        reference = torch.load(_file(folder, 1, 0), weights_only=False)
        found = [_compared(*pair) for pair in zip(reference, recorder.steps, strict=True)]
    torch.save(found, _file(folder, processes.size, rank))


def _file(folder: str, size: int, rank: int) -> Path:
    return Path(folder) / f"{size}_{rank}.pt"


def _perturb(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=PERTURBATION)


@dataclass
class Recorder(lightning.Callback):
    """Keeps each step of the optimiser."""

    steps: list[Step] = field(default_factory=list)
    loss: float = 0.0

    def on_before_optimizer_step(self, trainer: Any, module: lightning.LightningModule, optimizer: Any) -> None:
        gradients = {n: p.grad.detach().clone() for n, p in module.named_parameters() if p.grad is not None}
        norm = float(torch.nn.utils.get_total_norm(list(gradients.values())))
        self.steps.append(Step(0.0, norm, gradients, {}))

    def on_train_batch_end(
        self, trainer: Any, module: lightning.LightningModule, outputs: Any, batch: Any, batch_index: int
    ) -> None:
        self.loss += float(outputs["loss"])  # that of a micro-batch is divided by their number
        if self.steps and not self.steps[-1].weights:
            self.steps[-1].weights = {n: p.detach().clone() for n, p in module.named_parameters()}
            self.steps[-1].loss, self.loss = self.loss, 0.0


def _compared(one: Step, mine: Step) -> StepDifferences:
    gradients, weights = _differences(one.gradients, mine.gradients), _differences(one.weights, mine.weights)
    return StepDifferences((one.loss, mine.loss), (one.norm, mine.norm), gradients, weights)


def _differences(one: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> dict[str, float]:
    """By parameter; infinite for what only one of them has, and for NaN."""
    largest = {name: float(values.abs().max()) for name, values in one.items()}
    floor = FLOOR * max(largest.values(), default=0.0)
    found = dict.fromkeys({**one, **mine}, float("inf"))
    for name in one.keys() & mine.keys():
        gap, scale = float((one[name] - mine[name]).abs().max()), max(largest[name], floor)
        found[name] = gap / scale if gap < float("inf") and scale > 0.0 else (0.0 if gap == 0.0 else float("inf"))
    return found


def _together(parts: Sequence[StepDifferences], replicas: int) -> StepDifferences:
    """Of all processes: their shares of the loss added up over the globe, averaged over replicas; the largest gaps."""
    first = parts[0]
    loss = sum(part.losses[1] for part in parts) / replicas
    norm = max((part.norms[1] for part in parts), key=lambda norm: _relative(first.norms[0], norm))
    gradients = {name: max(part.gradients[name] for part in parts) for name in first.gradients}
    weights = {name: max(part.weights[name] for part in parts) for name in first.weights}
    return StepDifferences((first.losses[0], loss), (first.norms[0], norm), gradients, weights)


def _relative(one: float, other: float) -> float:
    gap = abs(one - other)
    return gap / abs(one) if gap < float("inf") and one else (0.0 if gap == 0.0 else float("inf"))
