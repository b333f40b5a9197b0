"""What the CUDA compiler makes of the kernels: no spills, no more registers than budgeted, tensor cores in use."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cuda_on_cpu.build import CSRC, NUMBERS, build, kernel_sources, load, needs_compiler
from cuda_on_cpu.test_attention_kernels import DTYPES, CudaCase
from ops.test_compiled import whole

from sfno_dist import Grid
from sfno_dist.ops import compiled_cuda

PASSES = ("forward", "query_gradient", "key_gradient")
ARCHITECTURES = ("sm_80", "sm_90")
# Most registers of a thread and bytes of shared memory of a block of heads with 64 channels.
BUDGET = {
    (row["kernel"], row["number"], row["pass"]): row
    for row in csv.DictReader((Path(__file__).parent / "budget.csv").open())
}
TENSOR_CORES = {
    "float32": None,
    "tf32": "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    "bfloat16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "float16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
}


def resources(log: str) -> dict[tuple[str, ...], tuple[int, int]]:
    """(kernel, number, pass, architecture) -> registers, bytes of spills, from the report of ``-Xptxas -v``."""
    found = {}
    pattern = re.compile(
        r"entry function '\w*?\d(?P<kernel>[a-z]+)_kernelI\w*?NumberE(?P<number>\d)E(\w*?PassE(?P<pass>\d)E)?\w*' for "
        r"'(?P<arch>sm_\d+)'.*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
        r"Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    for match in pattern.finditer(log):
        of_pass = PASSES[int(match["pass"])] if match["pass"] else ""
        key = match["kernel"], NUMBERS[int(match["number"])], of_pass, match["arch"]
        found[key] = int(match["registers"]), int(match["stores"]) + int(match["loads"])
    return found


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("number", NUMBERS)
def test_kernels_compile_within_their_budget(number, tmp_path):
    command = ["nvcc", "-std=c++17", "-O3", "-Xptxas", "-v", "--keep", "--keep-dir", str(tmp_path)]
    command += ["-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=[sm_90,compute_90]"]
    command += ["-c", str(CSRC / "cuda" / f"{number}.cu"), "-o", str(tmp_path / "kernels.o")]
    compiled = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert compiled.returncode == 0, compiled.stderr[-3000:]

    measured = resources(compiled.stderr)
    expected = {(*key, arch) for key in BUDGET for arch in ARCHITECTURES if key[1] == number}
    assert set(measured) == expected
    for key, (registers, spilled) in measured.items():
        assert spilled == 0, f"{key}: {spilled} bytes of spills"
        most = int(BUDGET[key[:3]]["registers"])
        assert registers <= most, f"{key}: {registers} registers where the budget allows {most}"

    (ptx,) = (path.read_text() for path in tmp_path.glob("*compute_90*.ptx"))
    assert "cp.async.cg.shared.global" in ptx
    for name, instruction in TENSOR_CORES.items():
        assert instruction is None or (instruction in ptx) == (name == number)


@needs_compiler
@pytest.mark.parametrize("number", NUMBERS)
def test_shared_memory_stays_within_its_budget(number, monkeypatch):
    """Found on the CPU, where a launch says what it asks for."""
    library = load(build(kernel_sources()))
    monkeypatch.setattr(compiled_cuda, "_library", lambda: library)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = number == "tf32"
    try:
        case = CudaCase(
            whole(Grid("equiangular", 4, 8), Grid("equiangular", 4, 8), 1.0), 1, 64, 64, dtype=DTYPES[number]
        )
        library.sfno_dist_cuda_on_cpu_forget_shared_bytes()
        case.run()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for position, name in enumerate(PASSES):
        asked = library.sfno_dist_cuda_on_cpu_shared_bytes(position)
        assert asked == int(BUDGET["tile", number, name]["shared_bytes"]), name
