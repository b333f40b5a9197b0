"""A real SLURM of two nodes on this machine, in a folder of its own: up in a second, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "setpriv")
NODES = ("node0", "node1")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

# Two daemons on one host, told apart by their ports. More CPUs than there are, so that 2 tasks fit on each node.
# The credential's life also sets how long a requeued job waits before it starts again: 12 s instead of 121 s.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=cred_expire=5,socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={node0} CPUs=4 RealMemory=1000
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node1} CPUs=4 RealMemory=1000
PartitionName=all Nodes=node0,node1 Default=YES MaxTime=60 State=UP
"""


def missing() -> str | None:
    """Why SLURM cannot run here, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"SLURM is not installed: no {', '.join(absent)}"
    return None if os.geteuid() == 0 else "SLURM's daemons are started by root only"


@dataclass(frozen=True)
class Job:
    """One submitted script. ``output``: the file with what it wrote on both streams."""

    number: int
    output: Path
    cluster: Cluster

    def facts(self) -> dict[str, str]:
        """What ``scontrol show job`` tells: JobState, Restarts, ExitCode and more."""
        text = self.cluster.run("scontrol", "-o", "show", "job", str(self.number)).stdout
        return dict(word.partition("=")[::2] for word in text.split())

    @property
    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait_for_end(self, timeout_s: float) -> str:
        """The state in which it ended, such as COMPLETED or FAILED."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(lambda: self.facts()["JobState"] in ended, timeout_s, "the end")
        return self.facts()["JobState"]

    def wait(self, arrived, timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not arrived():
            if time.monotonic() > end:
                facts = self.facts()
                self.cluster.run("scancel", str(self.number))
                raise TimeoutError(f"job {self.number} ({facts}) without {what} in {timeout_s} s:\n{self.text}")
            time.sleep(0.2)


class Cluster:
    """Commands and jobs of a running cluster; ``running`` makes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "MASTER_"))}
        # The names of the nodes resolve nowhere, so the processes of a job are told where the first one is.
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH, "MASTER_ADDR": "127.0.0.1"}

    def run(self, *command: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def submit(self, *words: str | Path, cwd: Path, **environment: str) -> Job:
        """``sbatch *words`` in ``cwd``; a requeued job goes on in the same output file."""
        options = ["sbatch", "--parsable", "--open-mode=append", "--output=job-%j.txt"]
        done = self.run(*options, *words, cwd=cwd, **environment)
        if done.returncode:
            raise RuntimeError(f"sbatch: {done.stderr}")
        number = int(done.stdout)
        return Job(number, cwd / f"job-{number}.txt", self)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster of two idle nodes with 4 CPUs each, in ``folder``, until the block ends."""
    folder.chmod(0o755)  # munged refuses a socket that others cannot reach
    _configure(folder)
    cluster = Cluster(folder)
    daemons: list[subprocess.Popen] = []
    try:
        munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "key-file", "pid-file")]
        munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
        daemons.append(_start(cluster, "munged", "--foreground", "--force", *munge))
        _until(lambda: (folder / "munge.socket").exists(), daemons, folder)
        daemons.append(_start(cluster, "slurmctld", "-D", "-f", str(folder / "slurm.conf")))
        for node in NODES:
            daemons.append(_start(cluster, "slurmd", "-D", "-N", node, "-f", str(folder / "slurm.conf")))
        _until(lambda: cluster.run("sinfo", "-h", "-o", "%T %D").stdout.split() == ["idle", "2"], daemons, folder)
        yield cluster
    finally:
        _stop(cluster, daemons)


def _configure(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = dict(zip(("controller", *NODES), (one.getsockname()[1] for one in sockets), strict=True))
    user = pwd.getpwuid(os.geteuid()).pw_name
    text = CONFIGURATION.format(folder=folder, host=socket.gethostname().split(".")[0], user=user, **ports)
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()


def _start(cluster: Cluster, *command: str) -> subprocess.Popen:
    """A daemon that dies with this process, however that ends."""
    output = (cluster.folder / "daemons.txt").open("ab")
    with output:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _until(ready, daemons: list[subprocess.Popen], folder: Path) -> None:
    end = time.monotonic() + 30
    while not ready():
        if time.monotonic() > end or any(daemon.poll() is not None for daemon in daemons):
            logs = "\n".join(path.read_text()[-2000:] for path in [folder / "daemons.txt", *folder.glob("*.log")])
            raise RuntimeError(f"SLURM did not start:\n{logs}")
        time.sleep(0.05)


def _stop(cluster: Cluster, daemons: list[subprocess.Popen]) -> None:
    for daemon in reversed(daemons):
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()
    while _kill_what_is_left(cluster):  # one may start another between two looks
        time.sleep(0.05)


def _kill_what_is_left(cluster: Cluster) -> bool:
    """The processes of jobs outlive the daemons; they are known by the configuration they were started with."""
    mark = f"SLURM_CONF={cluster.folder}/slurm.conf".encode()
    found = False
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
                found = True
    return found
