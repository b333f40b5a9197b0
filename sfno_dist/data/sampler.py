"""Which samples make which batch: a function of the seed, the epoch and the data coordinate, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from sfno_dist.data.errors import DataError
from sfno_dist.mesh.decomposition import even_bounds


class Draw(NamedTuple):
    """A sample of a batch: the times of its fields, and what it counts in the mean over its process's batch.

    ``weight`` 0 marks a sample that stands in where a process has none of its own. ``number`` is that of the sample in
    the batch of all data replicas.
    """

    times: tuple[int, ...]
    weight: float = 1.0
    number: int = 0


class GlobalBatches(Sampler[list[Draw]]):
    """Batches of this process, as parts of batches that all data replicas share.

    One order of all samples, by (seed, epoch), is cut into batches of ``batch_size``; each of ``replicas`` takes its
    part of each batch, of equal size where they divide it. Every sample comes exactly once in an epoch: the last batch
    may be smaller. Weights make the mean over a process's batch, averaged over the replicas, the mean over the samples
    of the whole batch, however uneven the parts, so that the number of replicas does not change what is learned.

    ``sequences`` [n, T] are the times of each sample; it may be replaced between epochs.
    """

    def __init__(
        self,
        sequences: np.ndarray,
        batch_size: int,
        *,
        replicas: int = 1,
        replica: int = 0,
        seed: int = 0,
        shuffle: bool = False,
    ) -> None:
        if not isinstance(batch_size, int) or batch_size < replicas:
            raise DataError(
                f"data.batch_size counts the samples of all {replicas} data replicas together and gives each at least "
                f"one, got {batch_size!r}; raise it to {replicas} or more, or lower mesh.data"
            )
        self.sequences, self.batch_size = sequences, batch_size
        self.replicas, self.replica, self.seed, self.shuffle = replicas, replica, seed, shuffle
        self.epoch, self.consumed, self._batches_before = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch; an epoch that was resumed in its middle goes on there."""
        if epoch != self.epoch:
            self.epoch, self.consumed, self._batches_before = epoch, 0, 0

    def order(self) -> np.ndarray:
        """The samples of this epoch in their order, over all replicas   [n]"""
        count = len(self.sequences)
        # A stream that NumPy promises never to change, so that a run can be resumed with another version of it.
        return (
            np.random.RandomState([self.seed % 2**32, self.epoch]).permutation(count)
            if self.shuffle
            else np.arange(count)
        )

    def __len__(self) -> int:
        """Batches of the epoch, those before it was resumed included, as Lightning counts them."""
        return self._batches_before + -(-(len(self.sequences) - self.consumed) // self.batch_size)

    def __iter__(self) -> Iterator[list[Draw]]:
        order, sequences = self.order(), self.sequences
        for start in range(self.consumed, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            bounds = even_bounds(len(batch), self.replicas)
            mine = batch[bounds[self.replica] : bounds[self.replica + 1]]
            weight = self.replicas * len(mine) / len(batch)
            samples = mine if len(mine) else batch[:1]
            first = bounds[self.replica]
            yield [Draw(tuple(map(int, sequences[s])), weight, first + number) for number, s in enumerate(samples)]

    def state_dict(self, batches_done: int) -> dict[str, Any]:
        """After ``batches_done`` of ``len(self)`` batches of this epoch; plain numbers."""
        consumed = self.consumed + (batches_done - self._batches_before) * self.batch_size
        return {
            "epoch": self.epoch,
            "consumed": min(consumed, len(self.sequences)),
            "batches": batches_done,
            "samples": len(self.sequences),
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken, with any number of replicas and any batch size.

        ``DataError`` where the samples are not the same, so that what was left of the epoch cannot be told.
        """
        done = state["consumed"] >= state["samples"]
        for name, mine in (("samples", len(self.sequences)), ("seed", self.seed)):
            if state[name] != mine and state["consumed"] and not done:
                raise DataError(
                    f"the checkpoint was written in the middle of an epoch with {name} {state[name]}, now there are "
                    f"{mine}; resume with the same data, or from a checkpoint at the end of an epoch"
                )
        # After a whole epoch Lightning starts its workers on the next one before it names it.
        self.epoch = state["epoch"] + done
        self.consumed, self._batches_before = (0, 0) if done else (state["consumed"], state["batches"])
