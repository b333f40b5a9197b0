"""The commands of the project in processes forked from one that has imported everything: seconds less for each."""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["sfno_dist.training.run", "sfno_dist.cli", "hydra", "tensorboard"])


def train(cwd: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess:
    """``python train.py *overrides`` in ``cwd``."""
    return _run([ROOT / "train.py", *overrides], cwd, environment)


def sfno_dist(cwd: Path, *arguments, **environment: str) -> subprocess.CompletedProcess:
    """``sfno-dist *arguments`` in ``cwd``."""
    return _run([ROOT / "sfno_dist" / "cli.py", *arguments], cwd, environment)


def kill_once(there: Path, cwd: Path, *overrides: str) -> None:
    """``python train.py *overrides`` in ``cwd``, killed as soon as there is a file ``there``."""
    words = [str(word) for word in (ROOT / "train.py", *overrides)]
    process = CONTEXT.Process(target=_command, args=(words, cwd, {}, [cwd / "stdout.txt", cwd / "stderr.txt"]))
    process.start()
    while process.is_alive() and not there.exists():
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, (cwd / "stderr.txt").read_text()


def _run(words: list, cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    words = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        process = CONTEXT.Process(target=_command, args=(words, cwd, environment, outputs))
        process.start()
        process.join(600)
        process.kill()  # one that has not ended by now
        process.join()
        stdout, stderr = (path.read_text() for path in outputs)
    return subprocess.CompletedProcess(words, process.exitcode, stdout, stderr)


def _command(words: list[str], cwd: Path, environment: dict[str, str], outputs: list[Path]) -> None:
    for stream, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
