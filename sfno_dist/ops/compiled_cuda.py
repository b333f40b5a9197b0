"""The compiled CUDA kernels: ``forward`` and ``backward`` as in ``ops.reference``, and a schedule beside.

A call queues kernels on the current stream of the tensors' device: it waits for nothing, copies nothing between
host and device, and takes memory from PyTorch alone, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sfno_dist.ops import compiled


class _Schedule(ctypes.Structure):
    """sfno_dist_schedule"""

    _fields_ = (
        [("stream", ctypes.c_void_p)]
        + [(name, ctypes.c_int32) for name in ("device", "allow_tf32", "query_splits", "key_splits")]
        + [(name, ctypes.c_int64) for name in ("query_tiles", "key_tiles")]
        + [(name, ctypes.c_void_p) for name in ("query_schedule", "key_schedule", "workspace")]
    )


def forward(q: Tensor, k: Tensor, v: Tensor, *tables_and_schedule: Tensor | int) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` [B, N, Hq, Wq, D] over ``k`` [B, N, P, D] and ``v`` [B, N, P, Dv]; see ``ops.attend``.

    After the tables of ``compiled.forward`` comes ``Window.schedule``. Returns y [B, N, Hq, Wq, Dv] in the dtype of q,
    laid out [B, Hq, Wq, N, Dv] in memory, and lse [B, N, Hq, Wq] in float32. ``RuntimeError`` when the library has no
    CUDA kernels or they refuse the sizes, ``TypeError`` for other dtypes.
    """
    *tables, query_tiles, key_tiles, query_splits, key_splits = tables_and_schedule
    call, results, kept = compiled.forward_call(q, k, v, tables, memory=_memory())
    _run("sfno_dist_cuda_forward", call, q.device, (query_tiles, key_tiles, query_splits, key_splits))
    del kept
    return results


def backward(
    dy: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    *tables_schedule_and_needs: Tensor | int,
) -> compiled.Gradients:
    """Gradients of q, k and v from those of y and lse, laid out like y; None for those that are not needed."""
    *tables, query_tiles, key_tiles, query_splits, key_splits, needs_dq, needs_dkv = tables_schedule_and_needs
    needs = bool(needs_dq), bool(needs_dkv)
    call, gradients, kept = compiled.backward_call((dy, dlse, q, k, v, y, lse), tables, needs, memory=_memory())
    _run("sfno_dist_cuda_backward", call, q.device, (query_tiles, key_tiles, query_splits, key_splits))
    del kept
    return gradients


def _run(name: str, call: compiled.Call, device: torch.device, schedule: Sequence) -> None:
    query_tiles, key_tiles, query_splits, key_splits = schedule
    library = _library()
    with _current_stream(device) as stream:
        plan = _Schedule(stream, device.index or 0, _tf32_allowed(), query_splits, key_splits)
        plan.query_tiles, plan.key_tiles = len(query_tiles), len(key_tiles)
        plan.query_schedule, plan.key_schedule = query_tiles.data_ptr(), key_tiles.data_ptr()
        size = library.sfno_dist_cuda_workspace(ctypes.byref(call), ctypes.byref(plan))
        workspace = torch.empty(size // 4, dtype=torch.float32, device=device)
        plan.workspace = workspace.data_ptr()
        if getattr(library, name)(ctypes.byref(call), ctypes.byref(plan)) != 0:
            raise RuntimeError(library.sfno_dist_cuda_message().decode())


def _tf32_allowed() -> bool:
    """The user's wish for matrix products of float32; 16-bit inputs do not ask."""
    matmul = torch.backends.cuda.matmul
    # Since PyTorch 2.9 allow_tf32 cannot be read where the wish was uttered as fp32_precision, which knows both.
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


@contextlib.contextmanager
def _current_stream(device: torch.device) -> Iterator[int | None]:
    if device.type != "cuda":  # the tests' library, which computes on the CPU
        yield None
        return
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream


def _memory() -> str:
    return _library().sfno_dist_cuda_memory().decode()


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return declared(compiled.load_library())


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """``library`` with the types of its CUDA functions. ``RuntimeError`` where it has none."""
    if not hasattr(library, "sfno_dist_cuda_forward"):
        raise RuntimeError(
            f"{library._name} was built where no CUDA compiler was found: put nvcc on PATH (or name it in the "
            f"environment variable CUDACXX), run `pip install .` again, or choose backend='reference'"
        )
    for name in ("sfno_dist_cuda_message", "sfno_dist_cuda_memory"):
        getattr(library, name).restype = ctypes.c_char_p
    pointers = [ctypes.POINTER(compiled.Call), ctypes.POINTER(_Schedule)]
    for name in ("sfno_dist_cuda_forward", "sfno_dist_cuda_backward", "sfno_dist_cuda_workspace"):
        getattr(library, name).argtypes = pointers
    for name in ("sfno_dist_cuda_workspace", "sfno_dist_schedule_size"):
        getattr(library, name).restype = ctypes.c_int64
    if library.sfno_dist_schedule_size() != ctypes.sizeof(_Schedule):
        raise RuntimeError(f"{library._name} was built from another version of sfno-dist; run `pip install .` again")
    return library
