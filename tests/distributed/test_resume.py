"""A training goes on at another layout, and at the same one bit for bit; what one process cannot write all know."""

import functools
import os
import random
import resource

import lightning
import numpy as np
import pytest
import torch
from small_archive import archive, everything

from distributed.ranks import run_ranks
from distributed.test_strategy import Rank
from sfno_dist import ProcessMesh
from sfno_dist.training.checkpoint import build_model
from sfno_dist.training.checkpoint_io import VerifiedCheckpointIO
from sfno_dist.training.module import ForecastModule
from sfno_dist.training.resume import KeepLast, RandomState, find_checkpoint
from sfno_dist.training.strategy import GlobeStrategy

ONE, TILES, REPLICAS = (1, 1, 1), (1, 2, 2), (2, 1, 1)
SETTINGS = {
    "name": "SphericalTransformer", "embed_channels": 8, "depth": 1, "num_heads": 2,
    "latent_grid": {"kind": "legendre-gauss", "nlat": 6, "nlon": 12},
}  # fmt: skip


class Recording(ForecastModule):
    """Notes the times of each batch, and changes nothing."""

    def training_step(self, batch, batch_index):
        self.batches.append((self.trainer.global_step, batch["times"][:, 0].tolist()))
        return super().training_step(batch, batch_index)


class Draw(lightning.Callback):
    """Every process draws its own numbers; the training ends after so many steps."""

    def __init__(self, stop):
        self.stop = stop

    def on_train_start(self, trainer, module):
        if not trainer.ckpt_path:
            torch.manual_seed(trainer.global_rank)
            random.seed(trainer.global_rank)
            np.random.seed(trainer.global_rank)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        module.draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        trainer.should_stop = trainer.global_step == self.stop


def fit(layout, folder, output, *, resume=None, stop=None, room=None):
    """Batches, draws and weights of this process; or the error that ended it, told in one line."""
    mesh = ProcessMesh(*layout, timeout_s=300)
    data = everything(folder, str(folder / "a.nc"), rollout_steps=1, mesh=mesh)
    data.setup()
    torch.manual_seed(11)
    model = build_model(SETTINGS, data.recipe)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    # With a memory of earlier steps; Adam would magnify the rounding of gradients that are zero, as of k_bias.
    momentum = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    module = Recording(model, data.recipe, model_settings=SETTINGS, optimizer=momentum)
    module.batches, module.draws = [], []
    many = {"strategy": GlobeStrategy(mesh, cluster_environment=Rank(mesh)), "devices": mesh.size}
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=2,
        max_steps=9, num_sanity_val_steps=0, use_distributed_sampler=False, default_root_dir=output,
        callbacks=[KeepLast(output / "checkpoints", every_n_steps=5), RandomState(), Draw(stop)],
        plugins=[VerifiedCheckpointIO()], **(many if mesh.size > 1 else {}),
    )  # fmt: skip
    if room is not None and mesh.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    try:
        trainer.fit(module, datamodule=data, ckpt_path=find_checkpoint(resume, output, mesh))
    except ValueError as error:
        return str(error)
    weights = {name: weight.detach().clone().numpy() for name, weight in module.model.named_parameters()}
    return module.batches, module.draws, weights


def on(layout, *arguments, **settings):
    """What ``fit`` gives on each process of a layout."""
    size = layout[0] * layout[1] * layout[2]
    results = run_ranks(size, _fit_with, layout, arguments, settings)
    assert not any(isinstance(result, str) and "Traceback" in result for result in results), results
    return results


def _fit_with(layout, arguments, settings):
    return fit(layout, *arguments, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    archive(folder)
    return folder


@pytest.fixture(scope="module")
def serial(folder, tmp_path_factory):
    return on(ONE, folder, tmp_path_factory.mktemp("serial"))[0]


def samples(results, layout):
    """The times of each step's batch over all replicas, and the same on every tile of a globe."""
    globe = layout[1] * layout[2]
    steps = []
    for parts in zip(*(batches for batches, _, _ in results), strict=True):
        assert all(part == parts[rank - rank % globe] for rank, part in enumerate(parts))
        steps.append((parts[0][0], [time for part in parts[::globe] for time in part[1]]))
    return steps


@pytest.mark.parametrize(("before", "after"), [(ONE, TILES), (TILES, ONE), (REPLICAS, ONE), (TILES, REPLICAS)])
def test_a_training_goes_on_at_another_layout(folder, tmp_path, serial, before, after):
    """In the middle of the second epoch; the samples of every step are those of one process."""
    first = on(before, folder, tmp_path, stop=8)
    rest = on(after, folder, tmp_path, resume="auto")
    batches, _, weights = serial
    assert samples(first, before) + samples(rest, after) == batches and len(batches) == 9
    for result in rest:
        for name, weight in result[2].items():
            np.testing.assert_allclose(weight, weights[name], rtol=0, atol=2e-5, err_msg=name)


def test_at_the_same_layout_every_process_goes_on_with_its_own_bits(folder, tmp_path):
    layout = (3, 1, 1)  # a sum of two has the same bits in any order
    whole = on(layout, folder, tmp_path / "whole")
    first = on(layout, folder, tmp_path / "parts", stop=8)
    rest = on(layout, folder, tmp_path / "parts", resume="auto")
    assert len({str(draws) for _, draws, _ in whole}) == 3
    for one, two, all_of_it in zip(first, rest, whole, strict=True):
        assert one[0] + two[0] == all_of_it[0] and one[1] + two[1] == all_of_it[1]
        assert all(np.array_equal(two[2][name], weight) for name, weight in all_of_it[2].items())


def test_a_full_disk_ends_every_process_with_the_same_line(folder, tmp_path):
    results = on(REPLICAS, folder, tmp_path, room=10_000)
    assert len(set(results)) == 1 and "the checkpoint cannot be written (File too large)" in results[0]
    assert os.listdir(tmp_path / "checkpoints") == []


def test_a_checkpoint_that_cannot_be_read_ends_every_process_with_the_same_line(folder, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").write_text("")
    results = on(REPLICAS, folder, tmp_path, resume="auto")
    assert len(set(results)) == 1 and "last.ckpt: not a readable checkpoint" in results[0]
