"""Steps of training on a mesh are those of one process."""

import lightning
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader

from distributed.ranks import run_ranks
from sfno_dist import Decomposition, Grid, ProcessMesh, SphericalTransformer
from sfno_dist.training.strategy import GlobeStrategy

GRID, LATENT, SAMPLES = Grid("equiangular", 13, 24), Grid("legendre-gauss", 6, 12), 8


class Learner(lightning.LightningModule):
    def __init__(self, mesh, seed):
        super().__init__()
        self.mesh = mesh
        torch.manual_seed(seed)
        self.model = SphericalTransformer(2, 2, GRID, LATENT, embed_channels=8, depth=1, num_heads=2, mesh=mesh)
        torch.nn.init.normal_(self.model.head.weight)
        self.model.lift.bias.requires_grad_(False)
        tile = Decomposition(GRID, mesh)
        self.register_buffer("shares", torch.from_numpy(GRID.area_shares.copy())[tile.rows])
        self.norms = []

    def training_step(self, batch, _):
        return ((self.model(batch) - batch.flip(1)).square() * self.shares).sum((-2, -1)).mean()

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.requires_grad])))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Rank(LightningEnvironment):
    """A process that is already one of several."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    @property
    def creates_processes_externally(self):
        return True

    def world_size(self):
        return self.mesh.size

    def global_rank(self):
        return self.mesh.rank

    def local_rank(self):
        return self.mesh.rank


def trained(mesh, fields, seed, **settings):
    """Gradient norms and weights after two steps of two accumulated batches, clipped."""
    learner = Learner(mesh, seed)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        precision="64-true",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **settings,
    )
    trainer.fit(learner, DataLoader(fields, batch_size=2 // mesh.data))
    return learner, [*learner.norms, *(p.detach() for p in learner.model.parameters())]


def gaps(data, polar, azimuth):
    mesh = ProcessMesh(data, polar, azimuth, timeout_s=300)
    fields = torch.randn(SAMPLES, 2, *GRID.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tile = Decomposition(GRID, mesh)
    mine = fields[mesh.data_index :: data, :, tile.rows, tile.columns]
    strategy = GlobeStrategy(mesh, cluster_environment=Rank(mesh))
    learner, got = trained(mesh, mine, mesh.rank, strategy=strategy, devices=mesh.size)  # other weights on each
    assert torch.equal(learner.shares, torch.from_numpy(GRID.area_shares.copy())[tile.rows])
    _, expected = trained(ProcessMesh(), fields, 0)
    assert len(learner.norms) == 2
    return max(float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max()) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("data", "polar", "azimuth"), [(1, 2, 2), (1, 3, 1), (2, 1, 2), (2, 1, 1)])
def test_training_on_a_mesh_is_training_on_one_process(data, polar, azimuth):
    for result in run_ranks(data * polar * azimuth, gaps, data, polar, azimuth):
        assert isinstance(result, float) and result < 1e-10, result


def by_name():
    mesh = ProcessMesh(azimuth=2, timeout_s=300)
    fields = torch.randn(4, 2, 13, 12, dtype=torch.float64)
    learner, _ = trained(mesh, fields, 0, strategy="globe", devices=2, plugins=[Rank(mesh)])
    return learner.trainer.strategy.mesh == mesh


def test_the_strategy_has_a_name_and_then_takes_the_mesh_of_the_module():
    assert run_ranks(2, by_name) == [True, True]
