"""How fast a training goes, and what it waits for."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import lightning
import torch
from torch import Tensor

from sfno_dist.comm import sum_on_cpu
from sfno_dist.comm.wire import Flight

GIB = 2.0**30


class Throughput(lightning.Callback):
    """Logs, each ``trainer.log_every_n_steps`` steps, the same values on every process.

    ``speed/samples_per_s`` of all processes together, without validations; ``speed/data_wait`` and
    ``speed/communication``, the shares of the time in which a process waits for the next batch and for fields of other
    tiles, as means over the processes; ``speed/peak_gib``, the memory of the process that took most (of the GPU where
    there is one). Gradients are summed while others are computed, which communication does not count; on a GPU, which
    waits by itself, it counts the launches alone.
    """

    def __init__(self) -> None:
        self._mark, self._waited_before = 0.0, 0.0
        self._logged_step = 0
        self._window = torch.zeros(4, dtype=torch.float64)  # seconds, of data wait, of communication; samples

    def on_train_epoch_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._mark, self._waited_before = time.perf_counter(), Flight.waited_s

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._mark, self._waited_before = time.perf_counter(), Flight.waited_s

    def on_train_batch_start(self, trainer: Any, module: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._window[1] += time.perf_counter() - self._mark

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        now, waited = time.perf_counter(), Flight.waited_s
        samples = float((batch["weight"] > 0).sum())
        self._window += torch.tensor([now - self._mark, 0.0, waited - self._waited_before, samples])
        self._mark, self._waited_before = now, waited
        step = trainer.global_step
        if step % trainer.log_every_n_steps == 0 and step > self._logged_step:
            self._logged_step = step
            module.log_dict(self._measured(module), prog_bar=True)
            self._window.zero_()

    def _measured(self, module: Any) -> dict[str, float]:
        mesh = module.recipe.mesh
        of_processes = torch.zeros(mesh.size, 5, dtype=torch.float64)
        of_processes[mesh.rank, :4], of_processes[mesh.rank, 4] = self._window, _peak(module.device) / GIB
        of_processes = sum_on_cpu(of_processes, mesh)
        seconds, data, communication, samples, _ = of_processes.sum(0).tolist()
        return {
            "speed/samples_per_s": samples / mesh.globe_size / (seconds / mesh.size),
            "speed/data_wait": data / seconds,
            "speed/communication": communication / seconds,
            "speed/peak_gib": float(of_processes[:, 4].max()),
        }


def _peak(device: torch.device) -> float:
    """Most memory this process has held, in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
