"""A training that diverges ends while its weights are still good."""

from __future__ import annotations

import shlex
from typing import Any

import lightning
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


class TrainingDivergedError(ValueError):
    """A loss or gradient that is no longer finite: one line with the variable, time and step, on all processes."""


class Watchdog(lightning.Callback):
    """Ends the training before the first step that a loss or gradient without a finite value would make.

    The state before that step goes to ``path``: weights, optimiser, and the place in the data, with the batch at fault
    coming next. Also logs ``train/gradient_norm``, before clipping. With 16-mixed precision gradients may overflow, for
    which its scaler skips the step, so only losses are watched.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.times = torch.empty(0, 0)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        self.times = batch["times"]

    def on_before_backward(self, trainer: lightning.Trainer, module: Any, loss: Tensor) -> None:
        # A sum over all processes, so all of them see the same.
        if module.train_losses.isfinite().all():
            return
        found = _of_all_processes(_not_finite(module, self.times), module)
        if found:
            names = module.recipe.outputs
            step, v, what, target, start = found[0]
            others = [names[other] for other in sorted({place[1] for place in found} - {v})]
            text = f"the loss of {names[v]} is {what} at {target}, step {step + 1} of the forecast from {start}"
            text += f", and so are those of {', '.join(others)}" if others else ""
        else:
            text = f"the sum of the losses is no finite number, for the batch from {_text(self.times.min())} on"
        self._stop(trainer, text)

    def on_before_optimizer_step(self, trainer: lightning.Trainer, module: Any, optimizer: Any) -> None:
        if trainer.precision == "16-mixed":
            return
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        module.log("train/gradient_norm", norm)
        if norm.isfinite():
            return
        names = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
        what = f"gradient of {', '.join(names[:3])}{', ...' if names[3:] else ''}" if names else "norm of the gradient"
        self._stop(trainer, f"the {what} is no finite number, for the batch from {_text(self.times.min())} on")

    def _stop(self, trainer: lightning.Trainer, text: str) -> None:
        trainer.save_checkpoint(self.path)
        raise TrainingDivergedError(
            f"{text}, in step {trainer.global_step} (epoch {trainer.current_epoch}); the state before it is in "
            f"{self.path}: lower optim.optimizer.lr or trainer.gradient_clip_val, or look at the data of that time, "
            f"and go on with resume={shlex.quote(self.path)}"
        )


def _not_finite(module: Any, times: Tensor) -> list[tuple]:
    """(step, variable, what, target, start) of the fields of this process's tile whose loss is not finite."""
    losses = module.sample_losses.cpu()  # [B, T, V]
    return [
        (step, v, "nan" if losses[b, step, v].isnan() else "infinite", _text(times[b, step + 1]), _text(times[b, 0]))
        for b, step, v in (~losses.isfinite()).nonzero().tolist()
    ]


def _of_all_processes(found: list[tuple], module: Any) -> list[tuple]:
    size = module.recipe.mesh.size
    if size == 1:
        return sorted(found)
    gathered: list = [None] * size
    dist.all_gather_object(gathered, found)
    return sorted(place for places in gathered for place in places)


def _text(nanoseconds: Tensor) -> str:
    return str(np.datetime64(int(nanoseconds), "ns"))[:16]
