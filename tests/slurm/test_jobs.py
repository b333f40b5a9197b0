"""train.py in jobs of a real SLURM with two nodes: trained, requeued, killed, and wrongly asked for."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from slurm.cluster import Cluster, Job

ROOT = Path(__file__).parents[2]
TINY = ["experiment=smoke", "mesh=polar2_azimuth2", "~callbacks.progress", "~logger.tensorboard"]
pytestmark = pytest.mark.slow


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder to give sbatch in, with what the repository has in its own."""
    for name in ("train.py", "conf"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def submit(cluster: Cluster, folder: Path, *overrides: str) -> Job:
    """``sbatch slurm/train.sbatch`` with a diary of every step in ``folder``."""
    diary = [f"+callbacks.diary={{_target_: slurm.diary.Diary, folder: '{folder}', skew_s: 0.05}}"]
    script = ROOT / "slurm" / "train.sbatch"
    return cluster.submit(script, *TINY, *diary, *overrides, cwd=folder, **environment(cluster))


def environment(cluster: Cluster) -> dict[str, str]:
    """In which ``python`` is the one of the tests and imports what they do."""
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": ":".join(path), "PATH": f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"}


def steps(folder: Path, rank: int) -> list[tuple[int, int, int]]:
    """(restart, step, process) of each batch that the rank has begun."""
    path = folder / f"steps-{rank}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(restart), int(step), int(process)) for restart, _, step, process in map(str.split, lines)]


def wait_for_step(job: Job, folder: Path, step: int, timeout_s: float = 120) -> None:
    job.wait(lambda: any(s >= step for _, s, _ in steps(folder, 0)), timeout_s, f"step {step}")


def test_signal_to_skewed_ranks_saves_requeues_and_goes_on_at_the_same_step(cluster, checkout):
    job = submit(cluster, checkout, "trainer.max_epochs=2", "+trainer.limit_train_batches=20", "data.num_workers=1")
    wait_for_step(job, checkout, 4)
    assert cluster.run("scancel", "--signal=USR1", str(job.number)).returncode == 0
    assert job.wait_for_end(180) == "COMPLETED", job.text
    assert job.facts()["Restarts"] == "1"
    runs = {}
    for rank in range(4):
        for restart in (0, 1):
            runs[rank, restart] = [step for again, step, _ in steps(checkout, rank) if again == restart]
        assert runs[rank, 0] + runs[rank, 1] == list(range(40)), f"rank {rank}: {runs}"
    assert len({len(runs[rank, 0]) for rank in range(4)}) == 1
    assert len(runs[0, 0]) < 20
    assert f"SIGUSR1: saved step {len(runs[0, 0])}" in job.text
    assert [path.name for path in (checkout / "runs" / "smoke").iterdir()] == [f"slurm_{job.number}"]


def test_killed_task_ends_the_job_with_its_rank_named(cluster, checkout):
    job = submit(cluster, checkout)
    wait_for_step(job, checkout, 2)
    killed = time.monotonic()
    os.kill(steps(checkout, 3)[0][2], signal.SIGKILL)
    assert job.wait_for_end(60) == "FAILED"
    assert time.monotonic() - killed < 30  # not the mesh's 600 s
    assert re.search(r"task 3: Killed", job.text), job.text


@pytest.mark.parametrize(
    ("asked", "command", "told"),
    [
        (
            "--nodes=2 --ntasks-per-node=1",
            "srun --kill-on-bad-exit=1 python",
            "srun started 2 tasks (2 nodes x 1), but the mesh takes 4: give --nodes=2 --ntasks-per-node=2",
        ),
        (
            "--nodes=2 --ntasks=4",
            "srun --kill-on-bad-exit=1 python",
            "srun put 3 + 1 tasks on 2 nodes; each takes equally many: give --nodes=2 --ntasks-per-node=2",
        ),
        (
            "--nodes=2 --ntasks-per-node=2",
            "python",
            "this SLURM job has 4 tasks, but the command was started once, without srun: write srun before it, as in "
            "'srun python train.py ...'",
        ),
    ],
    ids=["too few", "uneven", "no srun"],
)
def test_wrong_tasks_are_one_line(cluster, checkout, asked, command, told):
    script = checkout / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH {asked}\n{command} train.py {' '.join(TINY)}\n")
    job = cluster.submit(script, cwd=checkout, **environment(cluster))
    assert job.wait_for_end(90) == "FAILED"
    own = [line for line in job.text.splitlines() if not line.startswith(("srun:", "slurmstepd"))]
    assert own == [f"error: {told}"]
