"""What is wrong with a SLURM job, by the variables that SLURM sets; tests/slurm asks SLURM itself."""

import re

import pytest

from sfno_dist.training.slurm import tasks_per_node, wrong_tasks

JOB = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "size"),
    [
        ({}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, 4),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, 4),  # it starts the others itself
        ({"TORCHELASTIC_RUN_ID": "7"}, 16),  # torchrun once on each node
    ],
)
def test_jobs_that_fit(change, size):
    assert wrong_tasks({**JOB, **change}, size) is None


def test_no_job():
    assert wrong_tasks({}, 4) is None


@pytest.mark.parametrize(
    ("per_node", "size", "mend"),
    [
        ("2(x2)", 8, r"4 tasks \(2 nodes x 2\), but the mesh takes 8: give --nodes=2 --ntasks-per-node=4$"),
        ("2(x2)", 1, r"mesh takes 1: give --nodes=1 --ntasks-per-node=1$"),
        ("2(x2)", 3, r"--nodes=1 --ntasks-per-node=3$"),
        ("3,1", 4, r"3 \+ 1 tasks on 2 nodes.* --nodes=2 --ntasks-per-node=2$"),
        ("3,1", 6, r"4 tasks \(3 \+ 1\), but the mesh takes 6: give --nodes=2 --ntasks-per-node=3$"),
        ("2,1(x2)", 4, r"2 \+ 1 \+ 1 tasks on 3 nodes.* --nodes=1 --ntasks-per-node=4$"),
    ],
)
def test_jobs_that_do_not_fit_are_told_the_options(per_node, size, mend):
    told = wrong_tasks({**JOB, "SLURM_STEP_TASKS_PER_NODE": per_node}, size)
    assert told and re.search(mend, told), told


def test_without_srun():
    told = wrong_tasks({name: value for name, value in JOB.items() if "STEP" not in name}, 4)
    assert told and "'srun python train.py ...'" in told


def test_short_form():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
