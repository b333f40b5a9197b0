"""How gradients become one on a mesh: summed over the tiles of a globe, averaged over the data replicas."""

from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sfno_dist.data.failure import raise_everywhere
from sfno_dist.mesh import ProcessMesh
from sfno_dist.training.checkpoint import CheckpointError


class GlobeStrategy(DDPStrategy):
    """DDP for tiles: a process's loss is its tile's share, so gradients add up over polar x azimuth.

    Reduction overlaps with backward, bucket by bucket, and waits for the last of accumulated batches, as in DDP.
    Parameters start as those of the first process whatever the others drew; buffers differ by tile and stay.
    ``mesh`` None, as in ``Trainer(strategy="globe")``, takes the attribute ``mesh`` of the module that is trained.
    """

    strategy_name = "globe"

    def __init__(self, mesh: ProcessMesh | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.mesh = mesh

    def setup(self, trainer: lightning.Trainer) -> None:
        assert isinstance(self.model, nn.Module)
        self.mesh = self.mesh or getattr(self.lightning_module, "mesh", None)
        if self.mesh is None:
            raise ValueError("strategy globe: give it a ProcessMesh, or the module an attribute mesh that is one")
        # Neither DDP nor Lightning, which copies all of a module outside of fitting, may touch what differs by tile.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            self.model, [name for name, _ in self.model.named_buffers()]
        )
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        assert self.mesh is not None  # since setup
        wrapped = DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), init_sync=False)
        wrapped.register_comm_hook(self.mesh.data, summed_over_tiles)
        settle_buckets(wrapped)
        return wrapped

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """``CheckpointError`` on every process where the one that writes could not."""
        problem = None
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        except CheckpointError as error:
            problem = str(error)
        assert self.mesh is not None  # since setup
        raise_everywhere(problem, self.mesh, CheckpointError)


StrategyRegistry.register("globe", GlobeStrategy, "sums gradients over the tiles of a globe, averages over replicas")


def settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Lets DDP choose now, after a backward that counts for nothing, where each gradient lies in which bucket.

    It would choose after the first backward, and a sum over more than two processes depends in its last digit on the
    place: the first step of a training that goes on would have other bits than the same step of one that never stopped.
    """
    module, parameters = wrapped.module, [p for p in wrapped.parameters() if p.requires_grad]
    forward = module.forward
    # Backward takes the latest first, so the gradients come in the order of a backward through the model.
    module.forward = lambda: torch.stack([p.flatten()[0] * 0.0 for p in parameters]).sum()
    try:
        wrapped().backward()
    finally:
        module.forward = forward
    wrapped.zero_grad()


# DDP reads the annotation, so this file has no postponed ones.
def summed_over_tiles(replicas: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook of DDP: the sum over all processes over the number of data replicas, whose losses are means."""
    total = bucket.buffer().div_(replicas)
    work = dist.all_reduce(total, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
