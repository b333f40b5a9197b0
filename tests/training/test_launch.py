"""How many processes there are, which of them this is, and where their run goes: functions of the environment."""

import errno
import io
import math
import os
import socket
import sys
import tempfile

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf
from training.commands import train

from sfno_dist.training import hydra_run, launch
from sfno_dist.training.config import ConfigError
from sfno_dist.training.folder import make_writable
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


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match="RANK='zero' in the environment is no whole number"):
        Processes.of({**TORCHRUN, "RANK": "zero"})


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
    assert hydra_run.wanted(config(**settings), processes) == math.prod(axes)


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
        hydra_run.wanted(config(**settings), processes)


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


@pytest.fixture
def meeting():
    """What the first of two processes is told, with a port that somebody else holds."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        yield {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def test_a_taken_port_is_named_and_said_without_another_try(meeting, monkeypatch):
    for name, value in meeting.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", launch.RUN_ID):
        monkeypatch.delenv(name, raising=False)
    launch._reached.cache_clear()
    try:
        words = f"process 0 of 2 cannot meet the others at 127.0.0.1:{meeting['MASTER_PORT']} .*in use"
        with pytest.raises(ConnectionError, match=words):
            launch.run_id()
        assert launch.first_to_say("this")
    finally:
        launch._reached.cache_clear()


def test_the_command_says_so_in_one_line(meeting, tmp_path):
    done = train(tmp_path, "experiment=smoke", "mesh.polar=2", **meeting)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert f"127.0.0.1:{meeting['MASTER_PORT']}" in line


def test_words_of_pytorch_are_kept_without_their_place_and_greetings():
    error = RuntimeError(
        "[/pytorch/gloo/pair.cc:553] Connection closed by peer [::1]:7. This is typically a crash. GLHF!"
    )
    assert launch._cause(error) == "Connection closed by peer [::1]:7"


@pytest.mark.parametrize(
    "folder", ["/a b/c", "/a'b", "/a\\b", "/a\\'b", "/a\\", "/a\\\\b", "/a=b,[c]{d}", "/a$b%c", "/é\tö"]
)
def test_processes_get_the_folder_of_the_run_whatever_its_name(folder):
    override = OverridesParser.create().parse_override(f"hydra.run.dir={hydra_run._quoted(folder)}")
    assert override.value() == folder


@pytest.mark.parametrize("sweep", [False, True])
def test_processes_get_the_configuration_of_the_command(monkeypatch, sweep):
    sources = [("hydra", ""), ("main", "/mine/conf"), ("command-line", "/more"), ("schema", "")]
    hydra = {
        "mode": RunMode.MULTIRUN if sweep else RunMode.RUN, "job": {"config_name": "mine"},
        "runtime": {
            "cwd": "/here", "output_dir": "/out", "config_sources": [{"provider": p, "path": at} for p, at in sources],
        },
        "overrides": {"task": ["seed=2"], "hydra": ["hydra.mode=MULTIRUN", "hydra.sweep.dir=s", "hydra.verbose=true"]},
    }  # fmt: skip
    monkeypatch.setattr(hydra_run.HydraConfig, "get", lambda: OmegaConf.create(hydra))
    given = ["-m", "--config-name", "mine", "seed=1,2"]
    monkeypatch.setattr(sys, "argv", ["train.py", *given])
    of_sweep = ["--config-name=mine", "--config-path=/mine/conf", "--config-dir=/more", "hydra.verbose=true", "seed=2"]
    assert hydra_run._command() == ["/here/train.py", *(of_sweep if sweep else given), "hydra.run.dir='/out'"]


@pytest.mark.parametrize("sweep", [[], ["-m"]])
def test_a_folder_that_takes_no_file_is_one_line(tmp_path, sweep):
    (tmp_path / "file").touch()
    done = train(tmp_path, *sweep, "experiment=smoke", "mesh.polar=2", "paths.runs=file")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: file/smoke/") and "(Not a directory)" in line
    assert f"hydra.{'sweep' if sweep else 'run'}.dir=FOLDER or paths.runs=FOLDER" in line


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: Full())
    with pytest.raises(SystemExit, match=r"x: the output cannot be written there \(No space left"):
        make_writable(tmp_path / "x", "hydra.run.dir")
