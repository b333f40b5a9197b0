"""A training that is killed and goes on ends with the bits of one that was not."""

import random

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_archive import archive, everything

from sfno_dist import ProcessMesh
from sfno_dist.training.callbacks import WeightAverage
from sfno_dist.training.checkpoint import CheckpointError
from sfno_dist.training.checkpoint_io import VerifiedCheckpointIO
from sfno_dist.training.resume import KeepLast, RandomState, find_checkpoint

EPOCHS, BATCHES = 3, 6  # batches of an epoch


class Noisy(lightning.LightningModule):
    """Draws from every generator at every step; weights, moments and learning rate change at every step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
        self.batches = []

    def training_step(self, batch, batch_index):
        self.batches.append((self.current_epoch, batch_index, batch["times"][:, 0].tolist()))
        noise = random.random() + np.random.rand()
        return (self.net(batch["state"][:, 0, :3].mean((-2, -1))) - noise).square().mean()

    def validation_step(self, batch, batch_index):
        self.log("validation/loss", self.net(batch["state"][:, 0, :3].mean((-2, -1))).square().mean() + torch.rand(()))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class KilledError(Exception):
    """Stands for a kill: nothing is written after it."""


class Kill(lightning.Callback):
    """After so many batches, before or after what the others do then."""

    def __init__(self, after):
        self.after = after

    def on_train_batch_start(self, trainer, module, batch, batch_index):
        if len(module.batches) == self.after:
            raise KilledError


class Stop(lightning.Callback):
    """Asks for an end after so many batches, as a time limit does."""

    def __init__(self, after):
        self.after = after

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        trainer.should_stop = len(module.batches) == self.after


def fit(folder, output, *, resume=None, kill=None, every=1, workers=0, average=False, callbacks=(), **options):
    """Batches of the run, and all that its weights, optimizer and generators are at its end."""
    lightning.seed_everything(1, verbose=False)
    data = everything(folder, str(folder / "a.nc"), rollout_steps=1, num_workers=workers)
    module = Noisy()
    best = ModelCheckpoint(
        output / "checkpoints", filename="best", monitor="validation/loss", enable_version_counter=False
    )
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=output, plugins=[VerifiedCheckpointIO()],
        callbacks=[best, KeepLast(output / "checkpoints", every_n_steps=every), RandomState(), *callbacks]
        + ([] if kill is None else [Kill(kill)]) + ([WeightAverage(0.6)] if average else []),
        **{"max_epochs": EPOCHS, "num_sanity_val_steps": 0, **options},
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=find_checkpoint(resume, output, ProcessMesh()))
    end = {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "draws": (random.random(), np.random.rand(), torch.rand(3)),
        "best": best.best_model_score,
        "kept": torch.load(output / "checkpoints" / "last.ckpt")["state_dict"],  # the average where there is one
    }
    return module.batches, end


def assert_same(one, other):
    """Bit for bit, through dicts, lists and tuples."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def small_archive_in(folder):
    folder.mkdir(exist_ok=True)
    archive(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_archive_in(tmp_path_factory.mktemp("archive"))


OPTIONS = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 4},  # an epoch is one whole step and a shorter one
    "validated": {"val_check_interval": 2},
    "validated_between": {"accumulate_grad_batches": 4, "val_check_interval": 3},
    "averaged": {"average": True, "accumulate_grad_batches": 4, "val_check_interval": 3},
    "pairs": {"accumulate_grad_batches": 2},
    "rarely": {"every": 4},
    "rarely_validated": {"check_val_every_n_epoch": 2, "every": 5},
}


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The uninterrupted run of each kind, made once."""
    made = {}

    def run(kind):
        if kind not in made:
            made[kind] = fit(folder, tmp_path_factory.mktemp(kind), **OPTIONS[kind])
        return made[kind]

    return run


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("kill", [1, 6, 9, 17])
def test_a_killed_training_ends_as_one_that_was_not(folder, tmp_path, whole, kind, kill):
    expected, end = whole(kind)
    with pytest.raises(KilledError):
        fit(folder, tmp_path, kill=kill, **OPTIONS[kind])
    batches, resumed_end = fit(folder, tmp_path, resume="auto", **OPTIONS[kind])
    assert batches == expected[-len(batches) :]
    assert_same(resumed_end, end)


@pytest.mark.parametrize("stop", [8, 10, 12])
@pytest.mark.parametrize("by", ["asking", "max_steps"])
def test_a_training_that_was_told_to_stop_goes_on_from_its_last_step(folder, tmp_path, whole, stop, by):
    options = {"callbacks": [Stop(stop)]} if by == "asking" else {"max_steps": stop // 2}  # a step takes 2 batches
    fit(folder, tmp_path, every=100, **OPTIONS["pairs"], **options)
    batches, resumed_end = fit(folder, tmp_path, resume="auto", **OPTIONS["pairs"])
    expected, end = whole("pairs")
    assert batches == expected[stop:]
    assert_same(resumed_end, end)


@pytest.mark.parametrize("kill", [4, 8])
def test_workers_change_nothing(folder, tmp_path, whole, kill):
    expected, end = whole("rarely")
    with pytest.raises(KilledError):
        fit(folder, tmp_path, kill=kill, every=3, workers=2)
    batches, resumed_end = fit(folder, tmp_path, resume="auto", workers=2)
    assert batches == expected[3 * (kill // 3) :]
    assert_same(resumed_end, end)


def checkpoint(folder, name, number):
    VerifiedCheckpointIO().save_checkpoint({"number": number}, folder / "checkpoints" / f"{name}.ckpt")
    return folder / "checkpoints" / f"{name}.ckpt"


def cut(path):
    path.write_bytes(path.read_bytes()[:300])


def test_auto_is_the_last_checkpoint_of_the_run_or_none_yet(tmp_path):
    assert find_checkpoint("auto", tmp_path, ProcessMesh()) is None
    last = checkpoint(tmp_path, "last", 1)
    assert find_checkpoint("auto", tmp_path, ProcessMesh()) == last
    assert find_checkpoint(None, tmp_path, ProcessMesh()) is None


@pytest.mark.parametrize("asked", ["auto", "path"])
@pytest.mark.parametrize("spoil", [cut, lambda path: path.unlink()], ids=["cut", "gone"])
def test_a_spoilt_last_checkpoint_gives_way_to_the_one_before(tmp_path, caplog, asked, spoil):
    checkpoint(tmp_path, "last", 1)
    last = checkpoint(tmp_path, "last", 2)
    spoil(last)
    previous = last.with_name("previous.ckpt")
    assert find_checkpoint("auto" if asked == "auto" else str(last), tmp_path, ProcessMesh()) == previous
    (message,) = caplog.messages
    assert message.startswith(f"{last}: ") and message.endswith(f"going on from the one before it, {previous}")
    cut(previous)
    with pytest.raises(CheckpointError, match=r"last\.ckpt: .*give another one with resume=PATH"):
        find_checkpoint("auto", tmp_path, ProcessMesh())


def test_nothing_stands_in_for_a_named_checkpoint_that_is_not_the_last(tmp_path):
    checkpoint(tmp_path, "last", 1)
    checkpoint(tmp_path, "last", 2)
    best = checkpoint(tmp_path, "best", 3)
    cut(best)
    with pytest.raises(CheckpointError, match=r"best\.ckpt: not a readable checkpoint \(truncated"):
        find_checkpoint(str(best), tmp_path, ProcessMesh())
    with pytest.raises(CheckpointError, match=r"none\.ckpt: no such checkpoint file; give another one"):
        find_checkpoint(str(tmp_path / "none.ckpt"), tmp_path, ProcessMesh())


def test_a_checkpoint_that_lightning_would_take_unasked_is_refused(tmp_path):
    (tmp_path / "hpc_ckpt_3.ckpt").write_text("")
    with pytest.raises(CheckpointError, match=r"hpc_ckpt_3\.ckpt: Lightning would go on from this checkpoint unasked"):
        find_checkpoint(None, tmp_path, ProcessMesh())
    with pytest.raises(CheckpointError, match=r"hpc_ckpt_3\.ckpt"):
        find_checkpoint("auto", tmp_path, ProcessMesh())


def test_a_longer_rollout_goes_on_as_long_in_the_middle_of_an_epoch(folder):
    stages = {"train": [[0, 1], [2, 3]]}
    data = everything(folder, str(folder / "a.nc"), rollout_steps=stages)
    data.setup()
    data.load_state_dict({**data.batches["train"].state_dict(0), "epoch": 2, "samples": 0})
    batches = data.batches["train"]
    batches.set_epoch(2)
    middle, expected = batches.state_dict(2), list(batches)[2:]
    again = everything(folder, str(folder / "a.nc"), rollout_steps=stages)
    again.setup()
    again.load_state_dict(middle)
    assert list(again.batches["train"]) == expected and len(expected[0][0].times) == 4
