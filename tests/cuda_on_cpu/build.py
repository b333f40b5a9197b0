"""Builds the CUDA kernels' source for the CPU: once for each state of the sources, shared by all test processes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from sfno_dist.ops import compiled_cuda

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
NUMBERS = ("float32", "tf32", "bfloat16", "float16")
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


def build_library(flags: tuple[str, ...] = ("-O2",), source: Path = CSRC) -> Path:
    """The shared library of all kernels, with the C interface of csrc/attention_cuda.h."""
    files = [source / "attention_cuda.cu", *(source / "cuda" / f"{number}.cu" for number in NUMBERS)]
    return build([*files, HERE / "cuda_on_cpu.cpp"], flags, source)


def build(files: list[Path], flags: tuple[str, ...], source: Path = CSRC) -> Path:
    """A shared library of ``files``; nothing is compiled where it exists already."""
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in sorted({*files, *source.rglob("*.h"), *source.rglob("*.cu"), *HERE.glob("*.h")}):
        digest.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"sfno_dist_cuda_on_cpu_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    library = folder / f"{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = ["g++", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", *flags]
        command += ["-Wno-unknown-pragmas", f"-I{HERE}", f"-I{source}", "-x", "c++"]
        objects = [Path(scratch) / f"{path.stem}.o" for path in files]
        running = [
            subprocess.Popen([*command, "-c", str(path), "-o", str(to)])
            for path, to in zip(files, objects, strict=True)
        ]
        failures = [compiler.args[-3] for compiler in running if compiler.wait() != 0]
        assert not failures, f"g++ does not compile {failures}"
        linked = Path(scratch) / "library.so"
        subprocess.run(["g++", "-shared", *flags, *map(str, objects), "-o", str(linked)], check=True)
        linked.replace(library)
    return library


def load(library: Path) -> ctypes.CDLL:
    return compiled_cuda.declared(ctypes.CDLL(str(library)))
