"""The compiled CPU kernels: ``forward`` and ``backward`` with the signatures of ``ops.reference``.

The shared library has a plain C interface (csrc/attention.h) and is called through ctypes, once per pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

LIBRARY_VARIABLE = "SFNO_DIST_LIBRARY"
ISA_VARIABLE = "SFNO_DIST_ISA"  # read by the library with each call
LIBRARY_NAME = "libsfno_dist_kernels"
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Kept = tuple[Tensor | None, ...]  # whose memory a call names


class _Values(ctypes.Structure):
    """sfno_dist_tensor"""

    _fields_ = [("data", ctypes.c_void_p)] + [
        (f"{dim}_stride", ctypes.c_int64) for dim in ("batch", "head", "row", "column")
    ]


class Call(ctypes.Structure):
    """sfno_dist_attention"""

    _fields_ = (
        [("dtype", ctypes.c_int32), ("threads", ctypes.c_int32)]
        + [(name, ctypes.c_int64) for name in ("batches", "heads", "depth", "value_depth")]
        + [(name, ctypes.c_int64) for name in ("query_rows", "query_columns", "key_rows", "key_points")]
        + [(name, ctypes.c_int64) for name in ("query_nlon", "key_nlon", "first_column")]
        + [(name, ctypes.c_void_p) for name in ("half_widths", "key_weights", "key_windows")]
        + [(name, _Values) for name in ("q", "k", "v", "y")]
        + [("lse", ctypes.c_void_p)]
        + [(name, _Values) for name in ("dy", "dq", "dk", "dv")]
        + [("dlse", ctypes.c_void_p), ("delta", ctypes.c_void_p)]
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    half_widths: Tensor,
    key_weights: Tensor,
    key_rows: Tensor,
    nlon_out: int,
    nlon_in: int,
    first_column: int,
) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` [B, N, Hq, Wq, D] over ``k`` [B, N, P, D] and ``v`` [B, N, P, Dv]; see ``ops.attend``.

    Returns y [B, N, Hq, Wq, Dv] in the dtype of q, laid out [B, Hq, Wq, N, Dv] in memory, and lse [B, N, Hq, Wq]
    in float32 (float64 for float64). ``RuntimeError`` when the library is missing, ``TypeError`` for other dtypes.
    """
    tables = half_widths, key_weights, key_rows, nlon_out, nlon_in, first_column
    call, results, kept = forward_call(q, k, v, tables, memory="cpu")
    _run("sfno_dist_attention_forward", call)
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
    half_widths: Tensor,
    key_weights: Tensor,
    key_rows: Tensor,
    nlon_out: int,
    nlon_in: int,
    first_column: int,
    needs_dq: bool,
    needs_dkv: bool,
) -> Gradients:
    """Gradients of q, k and v from those of y and lse, laid out like y; None for those that are not needed."""
    tables = half_widths, key_weights, key_rows, nlon_out, nlon_in, first_column
    inputs = dy, dlse, q, k, v, y, lse
    call, gradients, kept = backward_call(inputs, tables, (needs_dq, needs_dkv), memory="cpu")
    delta = torch.empty(lse.shape, dtype=lse.dtype)
    call.delta = delta.data_ptr()
    _run("sfno_dist_attention_backward", call)
    del kept
    return gradients


def description() -> str:
    """Where the library lies, which instruction sets it has and which one is in use. One line."""
    path, library = _library_path(), load_library()
    chosen = library.sfno_dist_instruction_set()
    if chosen is None:
        raise RuntimeError(library.sfno_dist_message().decode())
    built = library.sfno_dist_instruction_sets().decode()
    return f"{path}: built for {built.replace(' ', ', ')}; {chosen.decode()} in use"


def forward_call(
    q: Tensor, k: Tensor, v: Tensor, tables: Sequence, *, memory: str
) -> tuple[Call, tuple[Tensor, Tensor], Kept]:
    """The call of a forward pass on tensors in ``memory``, y and lse that it fills, and what must live until then.

    ``tables``: what ``forward`` takes after q, k and v.
    """
    q, k, v = (_channels_contiguous(x) for x in (q, k, v))
    y = _empty_channels_last(q.shape[:-1] + v.shape[-1:], q)
    lse = q.new_empty(q.shape[:-1], dtype=_accumulation_dtype(q.dtype))
    call, kept = _call(q, k, v, y, lse, tables, memory)
    return call, (y, lse), kept


def backward_call(
    inputs: Sequence, tables: Sequence, needs: tuple[bool, bool], *, memory: str
) -> tuple[Call, Gradients, Kept]:
    """The call of a backward pass, dq, dk and dv that it fills, and what must live until then; delta is not set.

    ``inputs``: dy, dlse, q, k, v, y, lse. ``needs``: dq; dk and dv.
    """
    dy, dlse, q, k, v, y, lse = inputs
    dy, q, k, v, y = (_channels_contiguous(x) for x in (dy, q, k, v, y))
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.to(lse.dtype).contiguous()
    dq = _empty_channels_last(q.shape, q) if needs[0] else None
    dk, dv = (_empty_channels_last(x.shape, x) if needs[1] else None for x in (k, v))
    call, kept = _call(q, k, v, y, lse, tables, memory, dy, dlse)
    for name, tensor in (("dy", dy), ("dq", dq), ("dk", dk), ("dv", dv)):
        setattr(call, name, _values(tensor))
    call.dlse = None if dlse is None else dlse.data_ptr()
    return call, (dq, dk, dv), kept


def _call(
    q, k, v, y, lse, tables: Sequence, memory: str, dy: Tensor | None = None, dlse: Tensor | None = None
) -> tuple[Call, Kept]:
    """The arguments common to both passes, and all that a pass reads."""
    if q.dtype not in DTYPES or any(x.dtype != q.dtype for x in (k, v, y, y if dy is None else dy)):
        raise TypeError(
            f"the compiled kernels take float32, float64, bfloat16 or float16, one for all; got q {q.dtype}, "
            f"k {k.dtype}, v {v.dtype}" + ("" if dy is None else f", y {y.dtype}, dy {dy.dtype}")
        )
    half_widths, key_weights, key_rows, nlon_out, nlon_in, first_column = tables
    arrays = (half_widths.to(torch.int32).contiguous(), key_weights.double().contiguous(), key_rows.long().contiguous())
    kept = (q, k, v, y, lse, dy, dlse, *arrays)
    for tensor in kept:
        if tensor is not None and (tensor.device.type != memory or tensor.device != q.device):
            name = memory.upper()
            raise TypeError(
                f"the compiled {name} kernels take {name} tensors of one device, got q on {q.device} and another on "
                f"{tensor.device}"
            )
    call = Call(dtype=DTYPES[q.dtype], threads=torch.get_num_threads())
    call.batches, call.heads, call.query_rows, call.query_columns, call.depth = q.shape
    call.key_rows, call.key_points, call.value_depth = len(key_rows), k.shape[2], v.shape[-1]
    call.query_nlon, call.key_nlon, call.first_column = nlon_out, nlon_in, first_column
    call.half_widths, call.key_weights, call.key_windows = (array.data_ptr() for array in arrays)
    call.q, call.k, call.v, call.y = (_values(x) for x in (q, k, v, y))
    call.lse = lse.data_ptr()
    return call, kept


def _run(name: str, call: Call) -> None:
    library = load_library()
    if getattr(library, name)(ctypes.byref(call)) != 0:
        raise RuntimeError(library.sfno_dist_message().decode())


def _values(x: Tensor | None) -> _Values:
    """Address and strides of [B, N, rows, columns, channels] or [B, N, points, channels]."""
    if x is None:
        return _Values()
    batch, head, *points = x.stride()[:-1]
    return _Values(x.data_ptr(), batch, head, points[0], points[-1])


def _channels_contiguous(x: Tensor) -> Tensor:
    """``x`` itself where its channels follow one another in memory."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else _empty_channels_last(x.shape, x).copy_(x)


def _empty_channels_last(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """[B, N, points..., channels] over memory [B, points..., N, channels], as linear maps read and write it."""
    batch, heads, *rest = shape
    return like.new_empty(batch, *rest[:-1], heads, rest[-1]).movedim(-2, 1)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _library_path() -> Path:
    """The shared library: named by the environment, else beside this package, else where pip installed it."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise RuntimeError(f"{LIBRARY_VARIABLE}={named} is not a file; unset it or name the built library")
        return Path(named)
    # An editable install leaves the library in site-packages, beside no source file.
    folders = [Path(__file__).parents[1] / "lib"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        folders += [Path(str(importlib.metadata.distribution("sfno-dist").locate_file("sfno_dist/lib")))]
    for folder in folders:
        for path in sorted(folder.glob(f"{LIBRARY_NAME}.*")):
            return path
    raise RuntimeError(
        "the compiled kernels of sfno-dist are not installed: run `pip install .` in its source folder with a C++ "
        "compiler (Debian, Ubuntu: apt-get install g++), or choose backend='reference'"
    )


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    path = _library_path()
    library = ctypes.CDLL(str(path))
    for name in ("sfno_dist_message", "sfno_dist_instruction_sets", "sfno_dist_instruction_set"):
        getattr(library, name).restype = ctypes.c_char_p
    for name in ("sfno_dist_attention_forward", "sfno_dist_attention_backward"):
        getattr(library, name).argtypes = [ctypes.POINTER(Call)]
    library.sfno_dist_attention_size.restype = ctypes.c_int64
    if library.sfno_dist_attention_size() != ctypes.sizeof(Call):
        raise RuntimeError(f"{path} was built from another version of sfno-dist; run `pip install .` again")
    return library
