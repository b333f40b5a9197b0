"""A whole training on a mesh, with all that goes along with it, is that of one process."""

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from small_archive import archive, everything

from distributed.ranks import run_ranks
from distributed.test_strategy import Rank
from sfno_dist import ProcessMesh
from sfno_dist.training.callbacks import (
    ForecastMaps,
    Scores,
    Throughput,
    TrainingDivergedError,
    Watchdog,
    WeightAverage,
)
from sfno_dist.training.checkpoint import build_model
from sfno_dist.training.losses import Objective
from sfno_dist.training.module import ForecastModule
from sfno_dist.training.strategy import GlobeStrategy

SETTINGS = {"name": "SphericalTransformer", "embed_channels": 8, "depth": 2, "num_heads": 2}
SETTINGS["latent_grid"] = {"kind": "legendre-gauss", "nlat": 6, "nlon": 12}


class Spoils(lightning.Callback):
    """Puts NaN into one cell of the first sample's last target, on one process, in the third step."""

    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 2 and module.recipe.mesh.rank == self.rank:
            batch["state"][0, -1, 1, 2, 3] = torch.nan


def trained(folder, layout, spoiled=None, exchange="halo", recompute=True):
    """Logged values, weights and the message of an error, after rollouts of two steps, averaged and recomputed."""
    mesh = ProcessMesh(*layout, timeout_s=300)
    data = everything(folder, str(folder / "a.nc"), rollout_steps=2, batch_size=3, mesh=mesh)
    data.setup()
    torch.manual_seed(0)
    settings = {**SETTINGS, "recompute_blocks": recompute, "exchange": exchange}
    module = ForecastModule(
        build_model(settings, data.recipe), data.recipe, model_settings=SETTINGS,
        objective=Objective(loss_of={"tp": "l1", "z": "huber"}, weights={"t2m": 2.0}),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-2),
    )  # fmt: skip
    here = folder / f"{'_'.join(map(str, layout))}_{spoiled}"
    watched = [] if spoiled is None else [Spoils(spoiled)]
    callbacks = [Scores(), WeightAverage(0.5), Throughput(), Watchdog(str(here / "diverged.ckpt")), *watched]
    placed = {"strategy": GlobeStrategy(mesh, cluster_environment=Rank(mesh)), "devices": mesh.size}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=4, limit_val_batches=2, log_every_n_steps=2,
        gradient_clip_val=0.1, num_sanity_val_steps=0, callbacks=[*callbacks, ForecastMaps(str(here))],
        logger=CSVLogger(here), enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False, **(placed if mesh.size > 1 else {}),
    )  # fmt: skip
    message = ""
    try:
        trainer.fit(module, datamodule=data)
    except TrainingDivergedError as error:
        message = str(error)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = torch.cat([p.detach().flatten() for p in module.model.parameters()]).numpy()
    return logged, weights, message, sorted(path.name for path in here.glob("*.*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    archive(folder)
    return folder


@pytest.mark.parametrize(("layout", "exchange"), [((1, 2, 2), "halo"), ((2, 1, 2), "ring")])
def test_all_that_is_logged_and_learned_on_a_mesh_is_that_of_one_process(folder, layout, exchange):
    expected, weights, _, _ = trained(folder, (1, 1, 1), recompute=False)
    results = run_ranks(4, trained, folder, layout, None, exchange)
    for result in results:
        assert not isinstance(result, str), result
        logged, found, message, files = result
        assert not message and "epoch_0.png" in files
        np.testing.assert_allclose(found, weights, rtol=1e-3, atol=2e-6)
        assert logged == results[0][0]  # to the last bit
        for name, value in expected.items():
            if not name.startswith("speed/"):
                assert logged[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    speed = results[0][0]
    assert speed["speed/samples_per_s"] > 0 and 0 < speed["speed/communication"] < 1 and speed["speed/peak_gib"] > 0


def test_a_loss_that_is_not_finite_on_one_tile_stops_all_processes_with_the_same_words(folder):
    results = run_ranks(4, trained, folder, (2, 1, 2), 3)
    messages = {result[2] for result in results}
    assert len(messages) == 1, results
    (message,) = messages
    assert "the loss of z500 is nan at 2020-01-0" in message and "step 2 of the forecast from" in message
    assert "in step 2 (epoch 0)" in message and all(result[3] == ["diverged.ckpt"] for result in results)
