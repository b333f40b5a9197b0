"""From one command to all processes of the layout, however they were started: by themselves, by torchrun or by srun."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

from sfno_dist.mesh import ProcessLostError
from sfno_dist.training import slurm
from sfno_dist.training.config import ConfigError

# What torchrun tells each process, and what this module tells those that it or srun started.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RUN_ID = "SFNO_DIST_RUN_ID"
STARTED_BY = "SFNO_DIST_STARTED_BY"  # process that started this one
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# What gloo and NCCL say when the process at the other end of a transfer is gone.
CUT_OFF = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe", "NCCL error")


@dataclass(frozen=True)
class Processes:
    """``size`` processes, ``per_node`` on each node, of which this one is number ``rank``."""

    size: int = 1
    per_node: int = 1
    rank: int = 0
    local_rank: int = 0

    @property
    def nodes(self) -> int:
        return self.size // self.per_node

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Processes:
        """As torchrun or srun started them; one process where neither did."""
        if all(name in environment for name in VARIABLES):
            names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
            processes = cls(*(_whole_number(environment, name) for name in names))
        elif "SLURM_STEP_ID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
            size, nodes = int(environment["SLURM_NTASKS"]), int(environment.get("SLURM_NNODES", "1"))
            processes = cls(size, size // nodes, int(environment["SLURM_PROCID"]), int(environment["SLURM_LOCALID"]))
        else:
            processes = cls()
        return processes


def _whole_number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdecimal():
        raise ConfigError(
            f"{name}={environment[name]!r} in the environment is no whole number; start the processes with torchrun or "
            f"srun, or unset {', '.join(VARIABLES)}"
        )
    return int(environment[name])


def refuse_other_size(axes: Sequence[int], processes: Processes) -> None:
    """``ConfigError`` where other processes were started than a mesh of data x polar x azimuth ``axes`` has."""
    size, layout = math.prod(axes), " x ".join(map(str, axes))
    wrong = slurm.wrong_tasks(os.environ, size)
    if wrong:
        raise ConfigError(wrong)
    if processes.size > 1 and processes.size != size:
        raise ConfigError(
            f"{processes.size} processes were started, but the mesh has {layout} = {size} (data x polar x azimuth); "
            f"{processes.size} make {layouts(processes.size)}"
        )


def layouts(size: int) -> str:
    """Those of ``size`` processes, as overrides of ``mesh``, the squarest cuts of the globe first."""
    fit = [
        (data, polar, size // data // polar)
        for data in range(1, size + 1)
        for polar in range(1, size // data + 1)
        if size % (data * polar) == 0
    ]
    fit.sort(key=lambda sizes: (sizes[0], abs(sizes[1] - sizes[2]), sizes[1]))
    texts = [f"mesh.data={data} mesh.polar={polar} mesh.azimuth={azimuth}" for data, polar, azimuth in fit]
    return " or ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


@contextmanager
def joined(processes: Processes, *, on_gpu: bool, timeout_s: float) -> Iterator[None]:
    """Within the process group of ``processes``; a lost process is a ``ProcessLostError``, whoever notices it."""
    if processes.size == 1:
        yield
        return
    if on_gpu:
        torch.cuda.set_device(processes.local_rank)
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store(),
            rank=processes.rank,
            world_size=processes.size,
            timeout=timedelta(seconds=timeout_s),
        )
        yield
    except RuntimeError as error:
        cut_off = isinstance(error, dist.DistError) or any(words in str(error) for words in CUT_OFF)
        if isinstance(error, ProcessLostError) or not cut_off:
            raise
        raise ProcessLostError(
            f"process {processes.rank} lost another one, see the output of that ({_cause(error)})"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def store() -> dist.Store:
    """That all processes share: of torchrun or of the process that started the others, else kept by the first one.

    ``ConnectionError`` where it cannot be reached.
    """
    found = _reached()
    if isinstance(found, str):
        raise ConnectionError(found)
    return found


@lru_cache(maxsize=1)
def _reached() -> dist.Store | str:
    """The store or, found out once, as it takes minutes, why there is none."""
    environment = os.environ
    if not all(name in environment for name in VARIABLES):
        _as_torchrun_says(Processes.of(environment))
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    kept_elsewhere = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port, is_master = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), rank == 0
    try:
        shared = dist.TCPStore(address, port, size, is_master=is_master and not kept_elsewhere, wait_for_workers=False)
    except RuntimeError as error:
        return (
            f"process {rank} of {size} cannot meet the others at {address}:{port} ({_cause(error)}); "
            f"is the address of the first process in MASTER_ADDR, and a port that is free in MASTER_PORT?"
        )
    return dist.PrefixStore(f"sfno_dist/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)


def run_id() -> str:
    """Names the folder of a run, alike on all its processes; of a SLURM job also after it was requeued.

    The job's number, what torchrun was given as --rdzv-id, or else the time at which the run began.
    """
    environment = os.environ
    if RUN_ID in environment:
        return environment[RUN_ID]
    if "SLURM_JOB_ID" in environment:
        array = [environment[n] for n in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID") if n in environment]
        name = "slurm_" + ("_".join(array) or environment["SLURM_JOB_ID"])
    elif environment.get("TORCHELASTIC_RUN_ID", "none") != "none":
        name = f"torchrun_{environment['TORCHELASTIC_RUN_ID']}"
    else:
        name = time.strftime("%Y-%m-%d_%H-%M-%S-") + f"{time.time_ns() // 1000 % 1_000_000:06d}"
        if Processes.of(environment).size > 1:
            name = store().compare_set("run", "", name).decode()
    return environment.setdefault(RUN_ID, name)


def first_to_say(text: str) -> bool:
    """Whether no other process has said ``text`` yet, so that what all of them hit stands once in the terminal."""
    try:
        return Processes.of(os.environ).size == 1 or store().add(f"said/{text}", 1) == 1
    except (RuntimeError, ConnectionError):  # the store was never reached, or is gone with the process that kept it
        return True


def _cause(error: Exception) -> str:
    """What PyTorch and gloo say without place in their source, advice and greetings."""
    line = str(error).splitlines()[0]
    return re.sub(r"^\[/[^]]*\] ", "", line).split(". This is typically")[0]


def _as_torchrun_says(processes: Processes) -> None:
    """Sets the variables that torchrun would have set for the tasks of srun."""
    slurm = SLURMEnvironment(auto_requeue=False)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = slurm.main_address, str(slurm.main_port)
    os.environ["RANK"], os.environ["LOCAL_RANK"] = str(processes.rank), str(processes.local_rank)
    os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"] = str(processes.size), str(processes.per_node)


def start(size: int, command: Sequence[str]) -> None:
    """Runs this Python with ``command`` ``size`` times on this machine; ends with them, or when the first fails."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # said below, in a line
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives every one of them
    common = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True", RUN_ID: run_id(),
        STARTED_BY: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // size))),
    }  # fmt: skip
    context = start_processes(
        name="process",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(size), tuple(command)),
        envs={rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)},
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        result = context.wait(period=0.2)
    except SignalException as error:
        context.close(death_sig=error.sigval, timeout=60)
        sys.exit(128 + error.sigval)
    if result is not None and result.is_failed():
        first = min(result.failures.values(), key=lambda failure: failure.timestamp)
        if first.exitcode < 0:
            name = signal.Signals(-first.exitcode).name
            raise ProcessLostError(f"process {first.local_rank} was killed by {name}; the others were ended")
        sys.exit(first.exitcode)


def end_with_the_command() -> None:
    """Sends SIGTERM to this process, which then saves and stops, when the command that started it was killed.

    Nobody else would end it then, and the store that all processes share is gone. Only Linux can do this.
    """
    command = os.environ.pop(STARTED_BY, None)
    if command is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(command):
        raise ProcessLostError("the command that started this process was killed")
