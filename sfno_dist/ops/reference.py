"""Spherical attention in plain PyTorch: the readable statement of the operation.

Correct on any device and dtype, and the oracle of the compiled kernels. For each query row it holds one score
for every query of the row and every point of the key rows within reach, masked: right for small grids only.

Dims: b batch, n head, r query row, o query column, p key point (the key rows one after another), d channel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


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

    Returns y [B, N, Hq, Wq, Dv] in the dtype of q and lse [B, N, Hq, Wq] in float32 (float64 for float64).
    """
    wide = accumulation_dtype(q.dtype)
    y = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
    for r, keys, bias in _rows_within_reach(q, half_widths, key_weights, key_rows, nlon_out, nlon_in, first_column):
        p, lse[:, :, r] = _probabilities(q[:, :, r].to(wide), k[:, :, keys].to(wide), bias)
        y[:, :, r] = (p @ v[:, :, keys].to(wide)).to(q.dtype)
    return y, lse


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
    """Gradients of q, k and v from those of y and lse; None for those that are not needed."""
    wide = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    # delta_i = dy_i . y_i - dlse_i  [B, N, Hq, Wq]
    delta = (dy.to(wide) * y.to(wide)).sum(-1) - (0.0 if dlse is None else dlse.to(wide))
    for r, keys, bias in _rows_within_reach(q, half_widths, key_weights, key_rows, nlon_out, nlon_in, first_column):
        q_row, dy_row = q[:, :, r].to(wide), dy[:, :, r].to(wide)
        k_row, v_row = k[:, :, keys].to(wide), v[:, :, keys].to(wide)
        # The lse given may be that over more keys than the window's.
        p = torch.exp(q_row @ k_row.mT + bias - _finite(lse[:, :, r])[..., None])
        # ds_ij = p_ij (dy_i . v_j - delta_i)  [B, N, Wq, keys]
        ds = p * (dy_row @ v_row.mT - delta[:, :, r, :, None])
        dq[:, :, r] = ds @ k_row
        dk[:, :, keys] += ds.mT @ q_row
        dv[:, :, keys] += p.mT @ dy_row
    return (
        dq.to(q.dtype) if needs_dq else None,
        dk.to(k.dtype) if needs_dkv else None,
        dv.to(v.dtype) if needs_dkv else None,
    )


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; everything else is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _probabilities(q: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """p_ij = w_j exp(s_ij - lse_i)  [B, N, Wq, keys]  and  lse_i = log sum_j w_j exp(s_ij)  [B, N, Wq]."""
    scores = q @ k.mT + bias
    lse = torch.logsumexp(scores, dim=-1)
    # A query without a neighbour in this window has lse = -inf and probabilities 0, not NaN.
    return torch.exp(scores - _finite(lse)[..., None]), lse


def _finite(lse: Tensor) -> Tensor:
    """0 for the -inf of a query without a neighbour, whose scores are all -inf."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _rows_within_reach(
    q: Tensor,
    half_widths: Tensor,
    key_weights: Tensor,
    key_rows: Tensor,
    nlon_out: int,
    nlon_in: int,
    first_column: int,
) -> Iterator[tuple[int, slice, Tensor]]:
    """(query row, its key points, log w_p where p is a neighbour of query o and -inf elsewhere  [Wq, keys])."""
    ticks = math.lcm(nlon_out, nlon_in)
    first, counts, position = key_rows.unbind(1)
    points = int(counts.sum())
    row = torch.repeat_interleave(torch.arange(len(counts), device=q.device), counts, output_size=points)
    place = torch.arange(points, device=q.device) - position[row]
    key_tick = (first[row] + place) % nlon_in * (ticks // nlon_in)
    query_tick = (first_column + torch.arange(q.shape[3], device=q.device)) % nlon_out * (ticks // nlon_out)
    apart = (key_tick[None, :] - query_tick[:, None]).abs()
    apart = torch.minimum(apart, ticks - apart)
    log_weights = key_weights.log().to(accumulation_dtype(q.dtype))[row]
    for r, widths in enumerate(half_widths):
        # Key rows within the cutoff follow one another, and so do their points.
        within = torch.nonzero((widths >= 0)[row])
        if len(within):
            keys = slice(int(within[0]), int(within[-1]) + 1)
            neighbour = apart[:, keys] <= widths[row[keys]]
            yield r, keys, torch.where(neighbour, log_weights[keys], -torch.inf)
