"""Going on with a training: what is kept while it runs, and the checkpoint that it goes on from."""

from __future__ import annotations

import logging
import random
import shlex
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint

from sfno_dist.data import DataError
from sfno_dist.data.failure import has_processes, raise_everywhere
from sfno_dist.mesh import ProcessMesh
from sfno_dist.training.checkpoint import CheckpointError
from sfno_dist.training.checkpoint_io import LAST, PREVIOUS, damage

logger = logging.getLogger(__name__)


class KeepLast(Checkpoint):
    """Writes ``last.ckpt`` every ``every_n_steps`` optimizer steps, after every epoch, and where a training ends.

    Where a validation follows the step, after it; and never between the batches of one step. It comes after the
    callback that keeps the best, whose state it holds. ``DataError``, which comes to all processes at the same batch,
    ends a training with a checkpoint too, so that it goes on once the data are mended; of a step that takes several
    batches, those before the error are then lost.
    """

    def __init__(self, folder: str, *, every_n_steps: int) -> None:
        if not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps counts optimizer steps, at least 1, got {every_n_steps!r}")
        self.path, self.every_n_steps = Path(folder).absolute() / LAST, every_n_steps
        self.written_at = self.counted_from = -1

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.counted_from = trainer.global_step

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, batch: Any, batch_index: int
    ) -> None:
        if not validation_follows(trainer):
            self._save_where_due(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save_where_due(trainer)

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if _last_of_epoch(trainer):
            self.save(trainer)

    def on_exception(self, trainer: lightning.Trainer, module: lightning.LightningModule, error: BaseException) -> None:
        if isinstance(error, DataError) and trainer.state.fn == "fit" and trainer.global_step > 0:
            self.save(trainer)
            path = shlex.quote(str(self.path))
            logger.info("the training so far is in %s; go on with resume=%s", path, path)

    def save(self, trainer: lightning.Trainer) -> None:
        """Writes it, unless it was written at this step already; all processes call this alike."""
        if self.written_at != trainer.global_step:
            self.written_at = self.counted_from = trainer.global_step
            trainer.save_checkpoint(self.path)

    def _save_where_due(self, trainer: lightning.Trainer) -> None:
        ends = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        due = trainer.global_step - self.counted_from >= self.every_n_steps
        between = trainer.fit_loop.epoch_loop._should_accumulate()
        if (due or ends) and not between and not _last_of_epoch(trainer):
            self.save(trainer)


def _last_of_epoch(trainer: lightning.Trainer) -> bool:
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def validation_follows(trainer: lightning.Trainer) -> bool:
    """Whether one is due after this batch in a training that goes on.

    Lightning does not make up for it after a checkpoint that was written before it. It also validates where a training
    is told to stop; one that goes on from there knows nothing of that.
    """
    loop, fetcher, stops = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher, trainer.should_stop
    assert fetcher is not None
    trainer.should_stop = False
    try:
        return loop._should_check_val_fx(fetcher)
    finally:
        trainer.should_stop = stops


class RandomState(lightning.Callback):
    """The state of Python's, NumPy's and PyTorch's generators of every process in every checkpoint.

    Where another number of processes goes on, all of them take the state of the first.
    """

    def __init__(self) -> None:
        self.loaded: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """All processes call this alike."""
        mine = random_state()
        everybody = [mine]
        if dist.is_available() and dist.is_initialized():
            everybody = [mine] * dist.get_world_size()
            dist.all_gather_object(everybody, mine)
        return {"processes": everybody}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["processes"]

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        # What Lightning sets up between the loading and here may draw.
        if self.loaded:
            alike = len(self.loaded) == trainer.world_size
            set_random_state(self.loaded[trainer.global_rank if alike else 0])
            self.loaded = []


def random_state() -> dict[str, Any]:
    """Of the generators of this process, as plain numbers and tensors."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": (version, torch.tensor(numbers), gauss),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Puts the generators of this process where ``random_state`` found them."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def find_checkpoint(resume: str | None, output: str | Path, mesh: ProcessMesh) -> Path | None:
    """The checkpoint to go on from, the same on every process; None for a training from the start.

    Args:
        resume: path of a checkpoint; "auto" for the last one in ``output``, or none if there is none yet; or None.
        output: folder of this run.

    Where ``last.ckpt`` is damaged or gone, takes the one before and says so. Raises ``CheckpointError`` on all
    processes where there is none that can be read, or where Lightning would go on from one that nobody named.
    """
    chosen, problem = None, None
    if mesh.rank == 0:
        try:
            chosen = _choose(resume, Path(output))
        except CheckpointError as error:
            problem = str(error)
    raise_everywhere(problem, mesh, CheckpointError)
    return _of_first(chosen, mesh)


def _choose(resume: str | None, output: Path) -> Path | None:
    wanted = output / "checkpoints" / LAST if resume in (None, "auto") else Path(resume)
    before = wanted.with_name(PREVIOUS)
    if resume is None or (resume == "auto" and not wanted.exists() and not before.exists()):
        foreign = sorted(output.glob("hpc_ckpt_*"))
        if foreign:
            raise CheckpointError(
                f"{foreign[-1]}: Lightning would go on from this checkpoint unasked; name it with resume=PATH, or "
                f"move it out of the folder"
            )
        return None
    problem = _problem(wanted)
    if problem is None:
        return wanted.absolute()
    if wanted.name != LAST or _problem(before) is not None:
        raise CheckpointError(f"{problem}; give another one with resume=PATH")
    logger.warning("%s; going on from the one before it, %s", problem, before)
    return before.absolute()


def _problem(path: Path) -> str | None:
    if not path.is_file():
        return f"{path}: no such checkpoint file"
    found = damage(path)
    return None if found is None else f"{path}: not a readable checkpoint ({found})"


def _of_first(value: Any, mesh: ProcessMesh) -> Any:
    """What the first process holds, on all of them."""
    if not has_processes(mesh):
        return value
    held = [value]
    dist.broadcast_object_list(held, group=mesh.groups.replicas, group_src=0)
    dist.broadcast_object_list(held, group=mesh.groups.control, group_src=0)
    return held[0]
