"""``spherical_attention``: the operation on whole channel-first fields."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from sfno_dist.geometry import Grid, Neighbourhood
from sfno_dist.ops.attend import Window, attend


@lru_cache(maxsize=64)
def _window(grid_in: Grid, grid_out: Grid, theta_cutoff: float | None) -> Window:
    return Window.whole(Neighbourhood(grid_in, grid_out, theta_cutoff))


def spherical_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grid_in: Grid,
    grid_out: Grid | None = None,
    *,
    theta_cutoff: float | None = None,
    num_heads: int = 1,
    backend: str | None = None,
) -> Tensor:
    """Attention of every point of ``grid_out`` over the points of ``grid_in`` within ``theta_cutoff`` radians.

    y_i = sum_j w_j exp(q_i . k_j) v_j / sum_j w_j exp(q_i . k_j),  w_j the area of key point j

    Args:
        query: already scaled, [B, N*D, nlat_out, nlon_out]; heads are the leading factor of the channels.
        key: [B, N*D, nlat_in, nlon_in].
        value: [B, N*Dv, nlat_in, nlon_in].
        theta_cutoff: default as in ``Neighbourhood``.

    Returns [B, N*Dv, nlat_out, nlon_out] in the inputs' dtype. Raises ``ValueError`` for shapes that do not fit
    the grids or heads that do not divide the channels.
    """
    grid_out = grid_in if grid_out is None else grid_out
    for name, field, grid in (("query", query, grid_out), ("key", key, grid_in), ("value", value, grid_in)):
        check_field(field, grid, name)
    if key.shape[1] != query.shape[1]:
        raise ValueError(f"query and key must have the same channels, got {query.shape[1]} and {key.shape[1]}")
    q = split_heads(query.movedim(1, -1), num_heads, "query")
    k = split_heads(key.movedim(1, -1), num_heads, "key").flatten(2, 3)
    v = split_heads(value.movedim(1, -1), num_heads, "value").flatten(2, 3)
    y, _ = attend(q, k, v, _window(grid_in, grid_out, theta_cutoff), backend=backend)
    return merge_heads(y).movedim(-1, 1)


def split_heads(field: Tensor, num_heads: int, name: str) -> Tensor:
    """[B, H, W, N*D] -> [B, N, H, W, D], a view."""
    channels = field.shape[-1]
    if num_heads < 1 or channels % num_heads:
        raise ValueError(
            f"{name} has {channels} channels, which {num_heads} heads do not divide; choose num_heads among "
            f"{', '.join(str(n) for n in range(1, channels + 1) if channels % n == 0)}"
        )
    return field.unflatten(-1, (num_heads, channels // num_heads)).movedim(3, 1)


def merge_heads(field: Tensor) -> Tensor:
    """[B, N, H, W, D] -> [B, H, W, N*D]; a view where the memory is channels-last."""
    return field.movedim(1, 3).flatten(3)


def check_field(field: Tensor, grid: Grid, name: str) -> None:
    """A channel-first field on ``grid``: [B, C, nlat, nlon]."""
    if field.ndim != 4 or tuple(field.shape[2:]) != grid.shape:
        raise ValueError(
            f"{name} must be [batch, channels, {grid.nlat}, {grid.nlon}] for the grid {grid}, got {list(field.shape)}"
        )
