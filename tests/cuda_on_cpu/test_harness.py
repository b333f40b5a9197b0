"""The CPU that runs CUDA kernels: right kernels are right under every order of threads, wrong ones are caught."""

from __future__ import annotations

import ctypes

import pytest
from cuda_on_cpu.build import HERE, build, needs_compiler

pytestmark = needs_compiler
SEEDS = range(1, 9)


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build([HERE / "faulty_kernels.cpp", HERE / "cuda_on_cpu.cpp"])))
    library.message.restype = ctypes.c_char_p
    return library


@pytest.mark.parametrize(
    "name",
    [
        "barriers",
        "warp_barrier",
        "copies_waited_for",
        "warp_operations",
        "tensor_core_tiles",
        "number_conversions",
    ],
)
def test_right_kernels_are_right_in_any_order(kernels, name):
    for seed in SEEDS:
        kernels.sfno_dist_cuda_on_cpu_shuffle(seed)
        assert getattr(kernels, name)() == 0


@pytest.mark.parametrize(
    "name",
    [
        "barrier_before_reading_missing",
        "barrier_after_reading_missing",
        "warp_barrier_missing",
        "wait_for_copies_missing",
        "shared_memory_unwritten",
    ],
)
def test_wrong_kernels_give_wrong_results(kernels, name):
    for seed in SEEDS:
        kernels.sfno_dist_cuda_on_cpu_shuffle(seed)
        assert getattr(kernels, name)() > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("divergent_barrier", "a barrier that thread"),
        ("lonely_lane", "a warp operation that lane 5 does not take part in"),
    ],
)
def test_threads_that_wait_for_different_things_are_refused(kernels, name, words):
    for seed in SEEDS:
        kernels.sfno_dist_cuda_on_cpu_shuffle(seed)
        assert getattr(kernels, name)() == -1
        assert words in kernels.message().decode()
        assert "faulty_kernels.cpp:" in kernels.message().decode()
