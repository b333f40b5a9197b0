"""How many processes there are, which of them this is, and where their run goes: functions of the environment."""

import math

import pytest
from omegaconf import OmegaConf

from sfno_dist.training import launch
from sfno_dist.training.config import ConfigError
from sfno_dist.training.launch import Processes

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "77",
}  # fmt: skip


def config(devices="auto", num_nodes="auto", **mesh):
    axes = {"data": 1, "polar": 1, "azimuth": 1, **mesh}
    grid = {"data": "auto", "latent": {"nlat": 16, "nlon": 32}}
    return OmegaConf.create({"mesh": axes, "trainer": {"devices": devices, "num_nodes": num_nodes}, "grid": grid})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Processes()),
        (TORCHRUN, Processes(8, 4, 5, 1)),
        (SRUN, Processes(4, 2, 3, 1)),
        (SRUN | TORCHRUN, Processes(8, 4, 5, 1)),
        ({**SRUN, "SLURM_NTASKS": "1"}, Processes()),
        ({"RANK": "3"}, Processes()),  # a leftover of something else
    ],
)
def test_the_processes_are_those_that_were_started(environment, expected):
    assert Processes.of(environment) == expected


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        ({}, Processes()),
        ({"polar": 2, "azimuth": 2}, Processes()),
        ({"polar": 2, "azimuth": 2, "devices": 4}, Processes()),
        ({"polar": 2, "azimuth": 2, "devices": 2, "num_nodes": 2}, Processes(4, 2)),
        ({"data": 2, "polar": 2, "azimuth": 2}, Processes(8, 4, 5)),
    ],
)
def test_a_mesh_has_as_many_processes_as_its_axes_multiply_to(settings, processes):
    axes = [settings.get(axis, 1) for axis in ("data", "polar", "azimuth")]
    assert launch.wanted(config(**settings), processes) == math.prod(axes)


@pytest.mark.parametrize(
    ("settings", "processes", "words"),
    [
        ({}, Processes(4, 4), "4 processes were started.*1 x 1 x 1 = 1.*mesh.data=1 mesh.polar=2 mesh.azimuth=2"),
        ({"polar": 3}, Processes(4, 4), "1 x 3 x 1 = 3"),
        ({"devices": 6, "polar": 2}, Processes(), "trainer.devices=6.*6 processes make .*mesh.polar=2 mesh.azimuth=3"),
        ({"devices": 4, "polar": 2, "azimuth": 2}, Processes(4, 2), "trainer.devices=4.* 2 on each node"),
        ({"num_nodes": 2, "polar": 2}, Processes(), "trainer.num_nodes=2"),
        ({"polar": 0}, Processes(), "mesh.polar must be a whole number of at least 1, got 0"),
        ({"polar": 1.5}, Processes(), "got 1.5"),
        ({"polar": 17}, Processes(), "mesh.polar=17, but grid.latent has only 16 rows"),
        ({"azimuth": 200}, Processes(), "mesh.azimuth=200, but grid.latent has only 32 columns"),
        ({"devices": "two", "polar": 2}, Processes(), "trainer.devices=two"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_those_that_would(settings, processes, words):
    with pytest.raises(ConfigError, match=words):
        launch.wanted(config(**settings), processes)


@pytest.mark.parametrize("size", [1, 2, 7, 12])
def test_the_layouts_that_are_offered_have_that_many_processes(size):
    texts = launch.layouts(size).split(" and ")[0].split(" or ")
    for text in texts:
        assert math.prod(int(part.split("=")[1]) for part in text.split()) == size


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_JOB_ID": "77"}, "slurm_77"),
        ({"SLURM_JOB_ID": "78", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}, "slurm_77_3"),
        ({"TORCHELASTIC_RUN_ID": "winter"}, "torchrun_winter"),
        ({"SFNO_DIST_RUN_ID": "as_said", "SLURM_JOB_ID": "77"}, "as_said"),
    ],
)
def test_the_folder_is_named_by_what_all_processes_and_a_requeued_job_know(monkeypatch, environment, expected):
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", launch.RUN_ID):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(launch.RUN_ID, environment.get(launch.RUN_ID, ""))  # restored after the test
    if launch.RUN_ID not in environment:
        monkeypatch.delenv(launch.RUN_ID)
    assert launch.run_id() == expected
