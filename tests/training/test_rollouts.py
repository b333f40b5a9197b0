"""Longer rollouts as the training goes on, at once, resumed, and refused where the data are too short."""

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_archive import GRID, archive, everything
from training.test_data_in_training import fit

from sfno_dist.data import DataError
from sfno_dist.training.losses import Objective
from sfno_dist.training.module import ForecastModule

STAGES = {"train": [[0, 1], [1, 3], [3, 2]]}  # 24 times: batches of 4 of 23, 21 and 22 samples, 6 an epoch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    archive(folder)
    return folder


def data(folder, **changes):
    return everything(folder, str(folder / "a.nc"), **{"rollout_steps": STAGES, **changes})


class Lengths(lightning.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_index):
        times = batch["times"]
        assert batch["features"].shape[1] == times.shape[1] - 1
        assert torch.equal(times.diff(), torch.full_like(times[:, 1:], 6 * 3600 * 10**9))
        self.seen.append((trainer.current_epoch, times.shape[1] - 1, len(times)))


@pytest.mark.parametrize("workers", [0, 1])
def test_each_epoch_has_the_rollouts_of_its_stage_and_every_sample_once(folder, tmp_path, workers):
    lengths = Lengths()
    fit(data(folder, num_workers=workers, batch_size=7), tmp_path, max_epochs=4, callbacks=[lengths])  # 4, 3, 3, 4
    for epoch, steps in enumerate((1, 3, 3, 2)):
        batches = [(length, count) for e, length, count in lengths.seen if e == epoch]
        assert {length for length, _ in batches} == {steps}
        assert sum(count for _, count in batches) == 24 - steps


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("steps", [2, 6, 8, 12, 19])  # within stages, and at their ends
def test_a_run_goes_on_in_its_stage(folder, tmp_path, steps, workers):
    kept = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(data(folder), tmp_path, callbacks=[kept], max_epochs=4)
    lengths = Lengths()
    rest = fit(
        data(folder, num_workers=workers), tmp_path, resume=tmp_path / f"step={steps}.ckpt", callbacks=[lengths],
        max_epochs=4,
    )  # fmt: skip
    assert rest == whole[steps:]
    assert all(length == (1, 3, 3, 2)[epoch] for epoch, length, _ in lengths.seen)


def test_a_run_goes_on_after_an_epoch_in_the_next_stage(folder, tmp_path):
    kept = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = fit(data(folder), tmp_path, callbacks=[kept], max_epochs=4)
    for epoch in (0, 2):
        rest = fit(data(folder), tmp_path, resume=tmp_path / f"epoch={epoch}.ckpt", callbacks=[], max_epochs=4)
        assert rest == whole[6 * (epoch + 1) :]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (0, "whole number of at least 1"),
        ({"train": []}, "such as"),
        ({"train": [[1, 1]]}, "begins with epoch 0"),
        ({"train": [[0, 1], [2, 3], [1, 2]]}, "first epoch, steps"),
        ({"train": [[0, 1], [2, 0]]}, "at least 1"),
        ({"train": "long"}, "got 'long'"),
        ({"training": 2}, "names training; the splits are train, validation, test"),
        ({"train": [[0, 1], [5, 40]]}, "no 41 times 6 hours apart end in the train period"),
    ],
)
def test_stages_that_there_cannot_be_are_refused_before_the_first_epoch(folder, steps, words):
    with pytest.raises(DataError, match=words):
        data(folder, rollout_steps=steps).setup()


class OfTheState(torch.nn.Module):
    """out = weights . inputs at each point, so that a rollout can be written out."""

    def __init__(self, recipe):
        super().__init__()
        self.weights = torch.nn.Parameter(0.3 * torch.randn(recipe.out_channels, recipe.in_channels))

    def forward(self, inputs):
        return torch.einsum("vf,bfhw->bvhw", self.weights, inputs)


def test_the_loss_of_a_rollout_is_the_mean_over_its_steps_written_out(folder):
    archive_data = data(folder, rollout_steps=3)
    archive_data.setup()
    recipe = archive_data.recipe
    model = OfTheState(recipe)
    objective = Objective(loss_of={"tp": "l1"}, weights={"z": 3.0})
    module = ForecastModule(model, recipe, model_settings={}, optimizer=torch.optim.SGD, objective=objective)
    module.log = lambda *_, **__: None
    batch = next(iter(archive_data.train_dataloader()))
    loss = module.training_step(batch, 0)
    weights, area = model.weights.detach().double().numpy(), np.broadcast_to(GRID.cell_areas[:, None], GRID.shape)
    truth, features, valid = (batch[name].numpy() for name in ("state", "features", "valid"))
    losses = []
    for sample in range(len(truth)):
        state = truth[sample, 0, :3].astype(float)  # t2m, z500, sst; tp only comes out
        for step in range(3):
            out = np.einsum("vf,fhw->vhw", weights, np.concatenate([state, features[sample, step]]))
            forecast = np.concatenate([state + out[:3], out[3:]])
            error = forecast - truth[sample, step + 1]
            points = [error[0] ** 2, error[1] ** 2, error[2] ** 2, abs(error[3])]
            means = [np.average(x, weights=area * v) for x, v in zip(points, valid[sample, step + 1], strict=True)]
            losses.append(np.average(means, weights=[1.0, 3.0, 1.0, 1.0]))
            state = np.where(valid[sample, 0, :3], forecast[:3], truth[sample, 0, :3])  # land keeps its filling
    assert not valid.all() and loss.item() == pytest.approx(np.mean(losses), rel=1e-4)
    assert float((module.train_losses * module.weights).mean()) == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    assert model.weights.grad.isfinite().all()


class Longer(lightning.Callback):
    """Asks for rollouts of 2 in the middle of the first epoch."""

    def __init__(self, archive_data):
        self.data = archive_data

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        if trainer.current_epoch == 0 and batch_index == 2:
            self.data.set_rollout_steps(2)
            with pytest.raises(DataError, match=r"no 100 times .* apart end in the train period"):
                self.data.set_rollout_steps(99)
            with pytest.raises(DataError, match="rollouts of the validation split change between trainings only"):
                self.data.set_rollout_steps(2, "validation")


@pytest.mark.parametrize("workers", [0, 1])
def test_rollouts_asked_for_in_a_training_begin_with_its_next_epoch(folder, tmp_path, workers):
    archive_data, lengths = data(folder, rollout_steps=1, batch_size=11, num_workers=workers), Lengths()
    fit(archive_data, tmp_path, max_epochs=3, callbacks=[lengths, Longer(archive_data)])
    # 23 samples of one step are 3 batches, 22 of two are 2: the trainer counts anew
    assert [(e, steps) for e, steps, _ in lengths.seen] == [(0, 1)] * 3 + [(1, 2)] * 2 + [(2, 2)] * 2
