"""A training that is killed again and again, at moments that nobody chose, loses nothing."""

import random
import time

import lightning
import pytest
import torch
from training.commands import CONTEXT
from training.test_resume import assert_same, fit, small_archive_in

from sfno_dist.training.checkpoint_io import LAST, PREVIOUS, damage

KILLS = 20


class Tell(lightning.Callback):
    """Sends the step at the start of each batch."""

    def __init__(self, pipe):
        self.pipe = pipe

    def on_train_batch_start(self, trainer, module, batch, batch_index):
        self.pipe.send(trainer.global_step)


def train(folder, output, pipe):
    torch.set_num_threads(1)
    fit(folder, output, resume="auto", callbacks=[Tell(pipe)], max_epochs=25, val_check_interval=4)


def start(folder, output):
    mine, other = CONTEXT.Pipe()
    process = CONTEXT.Process(target=train, args=(folder, output, other))
    process.start()
    other.close()
    return process, mine


def wait_for_step(pipe):
    assert pipe.poll(60), "no step in a minute"
    return pipe.recv()


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_no_bit(tmp_path):
    folder = small_archive_in(tmp_path / "archive")
    process, _ = start(folder, tmp_path / "whole")
    process.join(120)
    assert process.exitcode == 0
    draw, steps = random.Random(4), []
    for _ in range(KILLS):
        process, pipe = start(folder, tmp_path / "killed")
        steps.append(wait_for_step(pipe))
        for _ in range(draw.randint(0, 4)):
            wait_for_step(pipe)
        time.sleep(draw.uniform(0.0, 0.04))  # of which a step and its checkpoint take a part
        process.kill()
        process.join()
        assert process.exitcode == -9
        kept = [path for name in (LAST, PREVIOUS) if (path := tmp_path / "killed" / "checkpoints" / name).exists()]
        assert all(damage(path) is None for path in kept)
    process, _ = start(folder, tmp_path / "killed")
    process.join(120)
    assert process.exitcode == 0
    assert steps == sorted(steps) and steps[-1] > KILLS  # each goes on from what the one before it kept
    ends = [torch.load(tmp_path / run / "checkpoints" / LAST) for run in ("whole", "killed")]
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_same(ends[0][part], ends[1][part])
    assert_same(ends[0]["callbacks"]["RandomState"], ends[1]["callbacks"]["RandomState"])
    assert sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()) == [
        "best.ckpt", LAST, PREVIOUS,
    ]  # fmt: skip
