"""A training that is killed again and again, at moments that nobody chose, loses nothing."""

import os
import random
import signal
import time

import lightning
import pytest
import torch
from training.commands import CONTEXT
from training.test_resume import assert_same, fit, small_archive_in

from sfno_dist.training.checkpoint_io import LAST, PREVIOUS, damage
from sfno_dist.training.requeue import SaveAndRequeue

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


class Signal(lightning.Callback):
    """Comes to the process itself after so many batches."""

    def __init__(self, after):
        self.after = after

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        if len(module.batches) == self.after:
            os.kill(os.getpid(), signal.SIGUSR1)


def train_in_long_steps(folder, output, asked_after):
    torch.set_num_threads(1)
    asked = [Signal(asked_after), SaveAndRequeue(str(output / "checkpoints" / LAST))]
    fit(folder, output, resume="auto", every=100, accumulate_grad_batches=3, callbacks=asked, val_check_interval=2)


def exit_status(work, *arguments):
    process = CONTEXT.Process(target=work, args=arguments)
    process.start()
    process.join(120)
    return process.exitcode


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
    assert_same_end(tmp_path / "whole", tmp_path / "killed")
    assert sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()) == [
        "best.ckpt", LAST, PREVIOUS,
    ]  # fmt: skip


def assert_same_end(one, other):
    ends = [torch.load(run / "checkpoints" / LAST) for run in (one, other)]
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_same(ends[0][part], ends[1][part])
    assert_same(ends[0]["callbacks"]["RandomState"], ends[1]["callbacks"]["RandomState"])


@pytest.mark.parametrize("batches", [1, 2, 8])  # of steps that take three, with validations between them
def test_a_signal_between_the_batches_of_a_step_waits_for_its_end(tmp_path, batches):
    folder = small_archive_in(tmp_path / "archive")
    assert exit_status(train_in_long_steps, folder, tmp_path / "whole", 0) == 0
    assert exit_status(train_in_long_steps, folder, tmp_path / "asked", batches) == 128 + signal.SIGUSR1
    assert torch.load(tmp_path / "asked" / "checkpoints" / LAST)["global_step"] == -(-batches // 3)
    assert exit_status(train_in_long_steps, folder, tmp_path / "asked", 0) == 0
    assert_same_end(tmp_path / "whole", tmp_path / "asked")
