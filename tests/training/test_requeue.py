"""A signal to save and requeue: what was done before and after it is what an undisturbed run does."""

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

import lightning
import pytest
import torch
from distributed.ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset

from sfno_dist.training.callbacks.average import WeightAverage
from sfno_dist.training.requeue import SIGNALS, Agreement, SaveAndRequeue

EPOCH = [f"train {n}" for n in range(4)] + [f"validate {n}" for n in range(3)] + ["end"]
SANITY = ["validate 0"]


class Diary(lightning.LightningModule):
    """Writes down what it is asked to do, and during one of the entries sends itself and its workers a signal."""

    def __init__(self, when: str = "", number: int = signal.SIGUSR1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.entries: list[str] = []
        self.when, self.number = when, number

    def write(self, entry: str) -> None:
        self.entries.append(entry)
        if f"{self.current_epoch} {entry}" == self.when and not self.trainer.sanity_checking:
            processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
            subprocess.run(["kill", f"-{int(self.number)}", *map(str, processes)], check=True)  # as SLURM does
            time.sleep(0.3)  # a worker that died of it would be missed by now

    def training_step(self, batch, index):
        self.write(f"train {index}")
        return self.layer(batch[0]).sum()

    def validation_step(self, batch, index):
        self.write(f"validate {index}")

    def test_step(self, batch, index):
        self.write(f"test {index}")

    def on_train_epoch_end(self):
        self.write("end")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture(autouse=True)
def _signals_as_before():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    _forget_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in before.items():
        signal.signal(number, handler)


def _forget_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@pytest.fixture
def scontrol(tmp_path, monkeypatch) -> Path:
    """The file with what a stand-in for scontrol was told, in the job 37."""
    told = tmp_path / "told.txt"
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "37")
    return told


def trainer(path: Path, *callbacks: lightning.Callback) -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=2,
        num_sanity_val_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, SaveAndRequeue(str(path))],
    )


def loader(batches: int, workers: int = 0) -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(batches, 1)), num_workers=workers)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("when", "done"),
    [
        ("0 train 1", 2),
        ("0 train 3", 5),  # the last batch: the validation begins and is done anew
        ("0 validate 1", 6),
        ("1 train 0", 9),
        ("1 validate 2", 15),
    ],
)
def test_resumed_run_does_the_rest(tmp_path, scontrol, when, done, workers):
    path = tmp_path / "last.ckpt"
    first = Diary(when)
    with pytest.raises(SystemExit) as stop:
        trainer(path).fit(first, loader(4, workers), loader(3, workers))
    assert first.entries == (SANITY + 2 * EPOCH)[: done + 1]
    assert stop.value.code == 0
    assert scontrol.read_text() == "requeue 37\n"

    _forget_signals()  # a new process has nothing pending
    second = Diary()
    again = trainer(path)
    again.fit(second, loader(4), loader(3), ckpt_path=path)
    validation_started = [entry for entry in first.entries[1:] if entry.startswith("validate")][-1:]
    redone = int(validation_started[0].split()[1]) + 1 if first.entries[-1].startswith("validate") else 0
    assert second.entries == (2 * EPOCH)[done - redone :]
    assert again.global_step == 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", ["0 train 1", "0 validate 1"])
def test_averaged_weights_are_those_of_an_undisturbed_run(tmp_path, scontrol, when):
    path = tmp_path / "last.ckpt"
    weights = {}
    for run in ("undisturbed", "disturbed"):
        torch.manual_seed(0)
        module, average = Diary(when if run == "disturbed" else ""), WeightAverage(decay=0.5)
        if run == "disturbed":
            with pytest.raises(SystemExit):
                trainer(path, average).fit(module, loader(4), loader(3))
            _forget_signals()
            module, average = Diary(), WeightAverage(decay=0.5)
        again = trainer(path, average)
        again.fit(module, loader(4), loader(3), ckpt_path=path if run == "disturbed" else None)
        end = tmp_path / f"{run}.ckpt"
        again.save_checkpoint(end)
        weights[run] = torch.load(end, weights_only=False)["state_dict"]["layer.weight"]
    torch.testing.assert_close(weights["disturbed"], weights["undisturbed"], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_a_step_of_two_batches_is_done_first(tmp_path, scontrol):
    path = tmp_path / "last.ckpt"
    module, accumulating = Diary("0 train 0"), trainer(path)
    accumulating.accumulate_grad_batches = 2
    with pytest.raises(SystemExit):
        accumulating.fit(module, loader(4), loader(3))
    assert module.entries == [*SANITY, "train 0", "train 1"]
    assert torch.load(path, weights_only=False)["global_step"] == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 1])
def test_sigterm_saves_and_does_not_requeue(tmp_path, scontrol, workers):
    path = tmp_path / "last.ckpt"
    module = Diary("1 train 2", signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        trainer(path).fit(module, loader(4, workers), loader(3, workers))
    assert stop.value.code == 128 + signal.SIGTERM
    assert torch.load(path, weights_only=False)["global_step"] == 7
    assert not scontrol.exists()


@pytest.mark.filterwarnings("ignore")
def test_workers_are_gone_when_the_training_is(tmp_path, scontrol):
    next(iter(loader(1, workers=1)))  # PyTorch's handler is there before, so Lightning puts it back afterwards
    with pytest.raises(SystemExit):
        trainer(tmp_path / "last.ckpt").fit(Diary("0 train 3"), loader(4, 1), loader(3, 1))
    time.sleep(0.3)
    signal.raise_signal(signal.SIGCHLD)  # a worker that was killed and is still known would be an error here


@pytest.mark.filterwarnings("ignore")
def test_signal_in_the_final_scoring_requeues_with_what_there_is(tmp_path, scontrol):
    path = tmp_path / "last.ckpt"
    module = Diary("0 test 0")
    with pytest.raises(SystemExit):
        trainer(path).test(module, loader(3))
    assert module.entries == ["test 0"]
    assert scontrol.read_text() == "requeue 37\n"
    assert not path.exists()


@pytest.mark.filterwarnings("ignore")
def test_a_job_that_slurm_will_not_requeue_says_where_its_training_is(tmp_path, scontrol, caplog):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Requested operation is presently disabled' >&2; exit 1\n")
    path = tmp_path / "last.ckpt"
    with caplog.at_level("INFO"), pytest.raises(SystemExit) as stop:
        trainer(path).fit(Diary("0 train 1"), loader(4), loader(3))
    assert stop.value.code == 128 + signal.SIGUSR1
    assert "job 37 is not requeued: Requested operation is presently disabled" in caplog.text
    assert f"go on with resume={path}" in caplog.text


def test_all_processes_learn_of_the_largest_value_at_the_same_call():
    for rank, answers in enumerate(run_ranks(3, _agree)):
        assert answers == [0, 0, 0, 0, 10, 15], f"rank {rank}: {answers}"


def _agree() -> list[int]:
    rank = torch.distributed.get_rank()
    given = {0: [0, 0, 0, 0, 0, 0], 1: [0, 0, 0, 10, 10, 0], 2: [0, 0, 0, 0, 15, 0]}[rank]
    agreement = Agreement()
    answers = []
    for value in given:
        time.sleep(0.05 * rank)  # none of them is told when the others ask
        answers.append(agreement.on(value))
    return answers
