"""Longer rollouts as the training goes on, at once, resumed, and refused where the data are too short."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_archive import archive, everything
from training.test_data_in_training import fit

from sfno_dist.data import DataError

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
