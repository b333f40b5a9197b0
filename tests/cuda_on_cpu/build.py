"""Builds the CUDA kernels' source for the CPU: each file once for each state of the sources, for all test processes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sfno_dist.ops import compiled_cuda

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
NUMBERS = ("float32", "tf32", "bfloat16", "float16")
FLAGS = ("-O1",)
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")

needs_compiler = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="needs g++ on Linux")


def kernel_sources(source: Path = CSRC) -> list[Path]:
    """All that the C interface of csrc/attention_cuda.h consists of."""
    kernels = [source / "cuda" / f"{number}.cu" for number in NUMBERS]
    return [source / "attention_cuda.cu", *kernels, HERE / "cuda_on_cpu.cpp"]


def build(files: list[Path], flags: tuple[str, ...] = FLAGS) -> Path:
    """A shared library of ``files``; what exists already is not compiled again."""
    with _build_folder() as folder:
        objects = [folder / f"{_digest(path, flags)}.o" for path in files]
        running = {
            path: subprocess.Popen([*_command(path, flags), "-c", str(path), "-o", f"{to}.part"])
            for path, to in zip(files, objects, strict=True)
            if not to.exists()
        }
        failures = [path for path, compiler in running.items() if compiler.wait() != 0]
        assert not failures, f"g++ does not compile {failures}"
        for path in running:
            to = objects[files.index(path)]
            Path(f"{to}.part").replace(to)
        names = hashlib.sha256("".join(to.name for to in objects).encode())
        library = folder / f"{names.hexdigest()[:16]}.so"
        if not library.exists():
            command = ["g++", "-shared", *flags, *map(str, objects), "-o", f"{library}.part"]
            subprocess.run(command, check=True)
            Path(f"{library}.part").replace(library)
        return library


def load(library: Path) -> ctypes.CDLL:
    return compiled_cuda.declared(ctypes.CDLL(str(library)))


@contextlib.contextmanager
def _build_folder() -> Iterator[Path]:
    """A folder of this user's, one process at a time."""
    folder = Path(tempfile.gettempdir()) / f"sfno_dist_cuda_on_cpu_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _root(path: Path) -> Path:
    """The csrc folder that a file's own headers are in."""
    return next((parent for parent in path.parents if parent.name == "csrc"), CSRC)


def _command(path: Path, flags: tuple[str, ...]) -> list[str]:
    command = ["g++", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *flags]
    return [*command, "-Wno-unknown-pragmas", f"-I{HERE}", f"-I{_root(path)}", "-x", "c++"]


def _digest(path: Path, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(" ".join(_command(Path(path.name), flags)).encode())
    for read in (path, *sorted(_root(path).rglob("*.h")), *sorted(HERE.glob("*.h"))):
        digest.update(read.read_bytes())
    return digest.hexdigest()[:16]
