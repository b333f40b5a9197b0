"""Stopping when the machine asks: save, hand the job back to SLURM, and go on later at the same step.

Nothing is done inside a signal handler. A process may be asked while another sits in an exchange where no handler of
Python runs, so the processes first agree, at the end of a batch, and then all save together.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import shlex
import signal
import subprocess
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import torch
import torch.distributed as dist

from sfno_dist.training.resume import validation_follows

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
PATIENCE = 10.0  # s for a killed process to be gone


class SaveAndRequeue(lightning.Callback):
    """On SIGUSR1 (the time limit is near) saves and requeues the job; on SIGTERM (it is being ended) saves and stops.

    The signal may come to any of the processes, to each at another batch, or to several. All stop after the same batch
    with a checkpoint in ``path``. In the midst of a validation it is written so that the validation begins anew.
    Without SLURM both signals save and stop.

    SLURM sends a signal to every process of a step, the workers that read data too. Blocked signals wait and end
    nobody: SIGUSR1 is blocked from the first line of ``train.py``, SIGTERM while there is something to save.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._handled = 0  # number of the signal that the handler saw
        self._agreement = Agreement()

    def setup(self, trainer: lightning.Trainer, module: lightning.LightningModule, stage: str) -> None:
        if stage == "fit":
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the workers, started later, inherit it
            atexit.register(_end_workers)

    def teardown(self, trainer: lightning.Trainer, module: lightning.LightningModule, stage: str) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def on_exception(self, trainer: lightning.Trainer, module: lightning.LightningModule, error: BaseException) -> None:
        _end_workers()

    def on_sanity_check_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._listen()

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._listen()

    def on_test_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        signal.signal(signal.SIGUSR1, self._handle)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing to save

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        number = self._agreement.on(self._received())
        # A validation that follows is left out after a checkpoint from here: its first batch sees to it.
        later = trainer.is_last_batch or validation_follows(trainer)
        if number and not later and not _between(trainer):
            self._stop(trainer, number, save=True)

    def on_validation_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        number = self._agreement.on(self._received())
        if not number or trainer.state.fn != "fit" or _between(trainer):
            return
        if not trainer.sanity_checking:
            # A validation that has begun and done nothing is what Lightning begins anew.
            progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
            progress.reset()
            progress.increment_ready()
            progress.increment_started()
            progress.current.reset()
        self._stop(trainer, number, save=not trainer.sanity_checking)

    def on_test_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        number = self._agreement.on(self._received())
        if number:
            self._stop(trainer, number, save=False)

    def _listen(self) -> None:
        """For a signal that reaches a thread of some library; Lightning's handler would exchange data inside it."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled = max(self._handled, number)

    def _received(self) -> int:
        """Number of the signal that this process has received, 0 for none."""
        return max([self._handled, *signal.sigpending().intersection(SIGNALS)])

    def _stop(self, trainer: lightning.Trainer, number: int, *, save: bool) -> None:
        if save:
            trainer.save_checkpoint(self.path)  # returns when all have saved
        status = 128 + number
        if trainer.is_global_zero:
            if save:
                logger.info("%s: saved step %d in %s", signal.Signals(number).name, trainer.global_step, self.path)
            job = os.environ.get("SLURM_JOB_ID")
            if number == signal.SIGUSR1 and job and _requeued(job):
                status = 0
            elif Path(self.path).exists():
                logger.info("go on with resume=%s", shlex.quote(self.path))
        raise SystemExit(status)


def _between(trainer: lightning.Trainer) -> bool:
    """Whether a step has taken some of its batches: their gradients are in no checkpoint, so the step is finished."""
    return not trainer.sanity_checking and trainer.fit_loop.epoch_loop._should_accumulate()


class Agreement:
    """The largest value that any process has given, known to all at the same call: one call after it was given.

    The exchange runs while the next batch does, on gloo, so that no device waits for it.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._work: dist.Work | None = None
        self._value = torch.zeros((), dtype=torch.int64)

    def on(self, value: int) -> int:
        """All processes call this alike. One process alone gets its value back at once."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return value
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        agreed = 0
        if self._work is not None:
            self._work.wait()
            agreed = int(self._value)
        self._value = torch.tensor(value, dtype=torch.int64)
        self._work = dist.all_reduce(self._value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed


def _end_workers() -> None:
    """At the end Python asks them with SIGTERM, which they do not hear, and would wait for ever."""
    workers = multiprocessing.active_children()
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's raises an error for a worker that was killed
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(PATIENCE)  # gone before Lightning puts PyTorch's handler back


def _requeued(job: str) -> bool:
    logger.info("requeueing job %s", job)
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    except FileNotFoundError:
        logger.error("job %s is not requeued: there is no scontrol on this node", job)
        return False
    if done.returncode:
        logger.error("job %s is not requeued: %s", job, done.stderr.strip())
    return done.returncode == 0
