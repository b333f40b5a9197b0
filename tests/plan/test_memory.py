"""What a plan says of memory and exchanges is what real trainings take, by the allocator's own account."""

import math
import os

import lightning
import pytest
import torch
from distributed.counting import received_messages
from distributed.ranks import run_ranks
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader

from sfno_dist import Grid, ProcessMesh
from sfno_dist.plan.step import in_precision, paper_batch, paper_module, step_cost
from sfno_dist.training.compose import compose_training
from sfno_dist.training.strategy import GlobeStrategy

PLAN = ["name=plan", "paths.output=."]
GRID = Grid("equiangular", 73, 144)
SIZES = {
    "small": ["data.batch_size=2"],
    "middle": ["grid.latent.nlat=36", "grid.latent.nlon=72", "model.embed_channels=48", "data.rollout_steps=2"],
    "large": ["grid.latent.nlat=64", "grid.latent.nlon=128", "model.embed_channels=64", "model.depth=4"],
}
LAYOUTS = {"1x1": (1, 1, 1), "2x2": (1, 2, 2)}


def trained(overrides: list[str], sizes: tuple[int, int, int]) -> tuple[int, int]:
    """Bytes at the peak of two steps of Lightning, as PyTorch's allocator reports them, and bytes received in them."""
    torch.set_num_threads(1)
    rank = str(torch.distributed.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(math.prod(sizes)), "GROUP_RANK": "0"}
    config = compose_training([*PLAN, *overrides])
    mesh = ProcessMesh(*sizes, timeout_s=60)
    with torch.profiler.profile(profile_memory=True) as profile, received_messages() as messages:
        module = paper_module(config, GRID, mesh)
        with in_precision(module, str(config.trainer.precision)):
            batch = paper_batch(config, module)
        trainer = lightning.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_steps=2,
            enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False, devices=mesh.size,
            strategy=GlobeStrategy(mesh, cluster_environment=TorchElasticEnvironment()) if mesh.size > 1 else "auto",
        )  # fmt: skip
        trainer.fit(module, DataLoader([batch], batch_size=None), val_dataloaders=None)
    changes = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, sum(message.nbytes for message in messages)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_memory_and_messages_are_those_of_a_training(size, layout):
    sizes = LAYOUTS[layout]
    found = run_ranks(math.prod(sizes), trained, SIZES[size], sizes)
    config = compose_training([*PLAN, *SIZES[size]])
    for rank, (peak, received) in enumerate(found):
        cost = step_cost(config, GRID, ProcessMesh.on_paper(*sizes, rank=rank))
        assert cost.total == pytest.approx(peak, rel=0.15)
        assert 2 * cost.received == received
