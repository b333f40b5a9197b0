"""train.py on several processes as users start them: what is learned, where it goes, and how it ends."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training.commands import ROOT, train

TINY = ["experiment=smoke", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "grid.latent.nlat=6"]
TINY += ["grid.latent.nlon=12"]
SHORT = ["+trainer.limit_train_batches=3", "+trainer.limit_val_batches=2", "+trainer.limit_test_batches=2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def only_run(cwd: Path) -> Path:
    (folder,) = (cwd / "runs" / "smoke").iterdir()
    return folder


def last_metrics(folder: Path) -> dict[str, float]:
    """The last value of everything that was logged, but for how fast it went."""
    with (folder / "csv" / "metrics.csv").open() as file:
        values = {name: float(value) for row in csv.DictReader(file) for name, value in row.items() if value}
    return {name: value for name, value in values.items() if not name.startswith("speed/")}


@pytest.fixture(scope="module")
def serial(tmp_path_factory) -> dict[str, float]:
    cwd = tmp_path_factory.mktemp("serial")
    done = train(cwd, *TINY, *SHORT)
    assert done.returncode == 0, done.stderr
    return last_metrics(only_run(cwd))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["polar2_azimuth2", "data2"])
def test_a_layout_learns_what_one_process_learns_into_one_folder(layout, serial, tmp_path):
    done = train(tmp_path, *TINY, *SHORT, f"mesh={layout}")
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path)
    assert last_metrics(folder) == pytest.approx(serial, rel=2e-4)
    assert {path.name for path in folder.iterdir()} == {
        ".hydra", "checkpoints", "csv", "curves.png", "tensorboard", "train.log",
    }  # fmt: skip
    assert done.stdout.count("test: one step") == 1 and done.stderr.count("UserWarning") == 0


@pytest.mark.slow
def test_torchrun_starts_the_same(serial, tmp_path):
    command = [*TORCHRUN, ROOT / "train.py", *TINY, *SHORT, "mesh=azimuth2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert last_metrics(only_run(tmp_path)) == pytest.approx(serial, rel=2e-4)


def test_torchrun_with_another_number_of_processes_says_so_once(tmp_path):
    command = [*TORCHRUN, ROOT / "train.py", *TINY, "mesh=polar2_azimuth2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and len(errors) == 1
    assert "2 processes were started, but the mesh has 1 x 2 x 2 = 4" in errors[0]


@pytest.mark.slow
def test_a_killed_process_is_named_and_ends_the_others(tmp_path):
    command = [sys.executable, ROOT / "train.py", *TINY, "mesh=azimuth2", "trainer.max_epochs=1000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=-1, text=True) as parent:
        try:
            ranks = wait_for(lambda: children_that_train(parent.pid, tmp_path), 120)
            os.kill(ranks[1], signal.SIGKILL)
            _, stderr = parent.communicate(timeout=90)
        finally:
            parent.kill()
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert parent.returncode == 1 and "process 1 was killed by SIGKILL" in lines[-1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_killed_command_takes_its_processes_along(tmp_path):
    command = [sys.executable, ROOT / "train.py", *TINY, "mesh=azimuth2", "trainer.max_epochs=1000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=-1, text=True) as parent:
        try:
            ranks = wait_for(lambda: children_that_train(parent.pid, tmp_path), 120)
        finally:
            parent.kill()
        _, stderr = parent.communicate(timeout=90)  # returns when nobody holds the pipes any more
    assert set(ranks) == {0, 1} and "Traceback" not in stderr
    assert (only_run(tmp_path) / "checkpoints" / "last.ckpt").exists()


def children_that_train(parent: int, cwd: Path) -> dict[int, int]:
    """Process numbers by rank, once there is a first line of metrics; empty before."""
    if not list(cwd.glob("runs/smoke/*/csv/metrics.csv")):
        return {}
    ranks = {}
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks |= {int(word[5:]): int(pid) for word in environment if word.startswith(b"RANK=")}
    return ranks


def wait_for(question, seconds: float):
    end = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < end, "nothing after so long"
        time.sleep(0.2)
    return answer
