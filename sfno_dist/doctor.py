"""``sfno-dist doctor``: what a report of a fault needs to know about this machine and this installation."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import netCDF4
import torch
import torch.distributed as dist

from sfno_dist.geometry import Grid
from sfno_dist.ops import compiled, compiled_cuda, spherical_attention

PACKAGES = (
    "sfno-dist",
    "torch",
    "lightning",
    "hydra-core",
    "torchmetrics",
    "xarray",
    "netCDF4",
    "zarr",
    "numpy",
    "scipy",
)
# What changes how processes, threads, files and kernels behave; nothing else of the environment is shown.
FAMILIES = ("OMP", "MKL", "KMP", "NCCL", "GLOO", "CUDA", "HDF5", "SFNO_DIST", "PYTORCH", "TORCH_NCCL")
VARIABLES = rf"({'|'.join(FAMILIES)})_\w+|RANK|(LOCAL_)?WORLD_SIZE|LOCAL_RANK|MASTER_(ADDR|PORT)"
SLURM = (
    r"SLURM_(JOB_ID|STEP_ID|JOB_PARTITION|JOB_NODELIST|NNODES|NTASKS|(STEP_)?TASKS_PER_NODE|NTASKS_PER_NODE|PROCID"
    r"|LOCALID|NODEID|CPUS_PER_TASK|CPU_BIND|GPUS\w*|MEM_PER_\w+|RESTART_COUNT|LAUNCH_NODE_IPADDR)"
)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # of the largest value; those of tests are tighter


def report(folder: str | os.PathLike = ".") -> tuple[str, bool]:
    """Text in sections, and whether the kernels in use agree with the reference.

    ``folder`` is where files are to be read and written. A probe that fails says why and ends nothing else.
    """
    sections: dict[str, Callable[[], list[tuple[str, str]]]] = {
        "versions": _versions,
        "kernels": _kernels,
        "processor": _processor,
        "GPUs": _gpus,
        "communication": _communication,
        "environment": lambda: _environment(VARIABLES),
        "SLURM": lambda: _environment(SLURM),
        f"files in {Path(folder).absolute()}": lambda: _files(Path(folder)),
    }
    lines = []
    for title, probe in sections.items():
        lines += [title, *(f"  {name:<22} {text}" for name, text in probe())]
    tests = self_test()
    lines += ["self-test: attention, forward and backward, against the reference", *(f"  {text}" for text, _ in tests)]
    return "\n".join(lines), all(passed for _, passed in tests)


def self_test() -> list[tuple[str, bool]]:
    """A line for each device with kernels and each dtype, and whether they agree: results and gradients alike."""
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    return [_agreement(device, dtype) for device in devices for dtype in TOLERANCES]


def _agreement(device: str, dtype: torch.dtype) -> tuple[str, bool]:
    grid, name = Grid("equiangular", 13, 24), f"{device}, {str(dtype).removeprefix('torch.')}"
    generator = torch.Generator().manual_seed(0)
    fields = [torch.randn(2, 32, *grid.shape, generator=generator).to(dtype) for _ in range(3)]
    try:
        results = [_passes(fields, grid, *where) for where in (("reference", "cpu"), (device, device))]
    except (RuntimeError, OSError, ValueError) as error:
        return f"{name}: FAILED, {_one_line(error)}", False
    distances = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*results, strict=True)]
    passed = all(distance < TOLERANCES[dtype] for distance in distances)  # false for NaN too
    words = (
        f"agrees within {max(distances):.1e}" if passed else f"DIFFERS by {', '.join(f'{d:.1e}' for d in distances)}"
    )
    return f"{name}: {words} of the largest value", passed


def _passes(fields: list[torch.Tensor], grid: Grid, backend: str, device: str) -> list[torch.Tensor]:
    """Attention and its three gradients, in float64   [2, 32, H, W] each; the reference computes in float64."""
    dtype = torch.float64 if backend == "reference" else fields[0].dtype
    query, key, value = inputs = [x.detach().to(device, dtype).requires_grad_() for x in fields]
    y = spherical_attention(query, key, value, grid, num_heads=2, theta_cutoff=0.5, backend=backend)
    y.backward(torch.cos(torch.arange(y.numel(), device=device)).reshape(y.shape).to(y))
    return [x.detach().double().cpu() for x in (y, *(x.grad for x in inputs if x.grad is not None))]


def _versions() -> list[tuple[str, str]]:
    found = [
        ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("system", platform.platform()),
    ]
    for name in PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    netcdf = f"netCDF {netCDF4.__netcdf4libversion__}, HDF5 {netCDF4.__hdf5libversion__}"
    return [*found, ("C libraries", f"{netcdf}, CUDA of torch {torch.version.cuda or 'none'}")]


def _kernels() -> list[tuple[str, str]]:
    return [
        ("CPU", _tried(compiled.description)),
        ("CUDA", _tried(lambda: f"built ({compiled_cuda.declared(compiled.load_library())._name})")),
        ("nvcc", shutil.which("nvcc") or "not on PATH"),
    ]


def _processor() -> list[tuple[str, str]]:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = f"{torch.get_num_threads()} within an operation, {torch.get_num_interop_threads()} between them"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        ("kind", _cpu_name()),
        ("cores", f"{os.cpu_count()}, of which this process may use {allowed}"),
        ("threads of torch", threads),
        ("memory", f"{memory:.1f} GiB, /dev/shm {_space(Path('/dev/shm'))}"),
    ]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _gpus() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        reason = (
            "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch finds no driver or device"
        )
        return [("none", reason)]
    found = []
    for n in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(n)
        found.append((f"{n}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB, sm_{about.major}{about.minor}"))
    return found


def _communication() -> list[tuple[str, str]]:
    nccl = "not in this PyTorch"
    if dist.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "in this PyTorch, no GPU"
    return [("gloo", _tried(_gloo)), ("NCCL", nccl), ("host", platform.node())]


def _gloo() -> str:
    """A group of this process alone: it fails where the host's name leads to no network interface."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        group = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=10))
        total = torch.ones(1)
        group.allreduce([total]).wait()  # type: ignore[attr-defined]
    return "works in a group of one process" if float(total) == 1.0 else "a sum over one process is wrong"


def _environment(pattern: str) -> list[tuple[str, str]]:
    found = [(name, os.environ[name]) for name in sorted(os.environ) if re.fullmatch(pattern, name)]
    return found or [("none", "no variable of this kind is set")]


def _files(folder: Path) -> list[tuple[str, str]]:
    if not folder.is_dir():
        return [("folder", "does not exist")]
    return [
        ("file system", _mount(folder.resolve())),
        ("free", _space(folder)),
        ("locks", _tried(lambda: _locks(folder))),
        ("netCDF", _tried(lambda: _netcdf(folder))),
    ]


def _mount(folder: Path) -> str:
    """Kind of the file system, such as nfs4 or lustre, and where it is mounted."""
    table = Path("/proc/self/mounts")
    mounts = [line.split()[1:3] for line in table.read_text().splitlines()] if table.exists() else []
    # Spaces in mount points are written as \040.
    held = [(re.sub(r"\\040", " ", place), kind) for place, kind in mounts]
    held = [(place, kind) for place, kind in held if folder.is_relative_to(place)]
    return "{1} on {0}".format(*max(held, key=lambda mount: len(mount[0]))) if held else "unknown"


def _locks(folder: Path) -> str:
    """HDF5 takes a shared or exclusive lock (flock) of each file that it opens."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with open(file.name, "rb") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return "work, and exclude others"
    return "are granted twice: the file system ignores them"


def _netcdf(folder: Path) -> str:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = os.path.join(place, "probe.nc")
        with netCDF4.Dataset(path, "w") as file:
            file.createDimension("x", 3)
            file.createVariable("x", "f4", ("x",))[:] = [1.0, 2.0, 3.0]
        with netCDF4.Dataset(path) as file:
            return "written and read" if file["x"][:].tolist() == [1.0, 2.0, 3.0] else "reads other values than written"


def _space(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB free" if folder.is_dir() else "does not exist"


def _tried(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except (RuntimeError, OSError, ValueError, AttributeError, ctypes.ArgumentError) as error:
        return f"no: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
