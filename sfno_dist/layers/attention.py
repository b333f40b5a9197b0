"""Attention over geodesic neighbourhoods, with its linear maps."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfno_dist.geometry import Grid, Neighbourhood
from sfno_dist.layers.exchange import make_exchange
from sfno_dist.layers.weights import SameWeights
from sfno_dist.mesh import Decomposition, ProcessMesh
from sfno_dist.ops.attend import as_autocast, resolve_backend
from sfno_dist.ops.functional import merge_heads, split_heads


class SphericalAttention(nn.Module):
    """Multi-head attention of each point of ``grid_out`` over its neighbourhood on ``grid_in``.

    The softmax integrates over the sphere, each key weighed by its quadrature weight (B. Bonev et al.,
    "Attention on the sphere", 2025), so the layer does not depend on how densely the grids sample it.

    Args:
        in_channels: channels of query, key and value fields.
        grid_in, grid_out: of the keys and of the queries; equal by default (self-attention).
        theta_cutoff: great-circle radius of the neighbourhood in radians; default as in ``Neighbourhood``.
        k_channels, out_channels: channels of query/key and of value/output, all heads together; ``in_channels``.
        qk_norm: root-mean-square normalisation of each head's query and key, times 1 + weight.
        scale: factor on the query; 1 / sqrt(k_channels / num_heads) by default.
        mesh: the processes that share the globe; fields are then tiles of it. One process by default.
        exchange: how keys come from other tiles: "halo" brings just the columns that arcs touch, "ring" passes all
            of a latitude band around in chunks. Both are exact.
        backend: how the operation is computed; see ``ops.attend``.

    Parameters are named and shaped as in torch-harmonics' ``NeighborhoodAttentionS2``, whose state dicts load.
    On a mesh the weights must be the same on all processes, which the first forward checks: give all of them the same
    seed or state dict. Each gets its tile's part of the weights' gradients, to be summed over the globe.
    Raises ``ValueError`` for heads that do not divide the channels and for a cutoff that leaves rows empty.
    """

    def __init__(
        self,
        in_channels: int,
        grid_in: Grid,
        grid_out: Grid | None = None,
        *,
        num_heads: int = 1,
        theta_cutoff: float | None = None,
        k_channels: int | None = None,
        out_channels: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        scale: float | None = None,
        mesh: ProcessMesh | None = None,
        exchange: str = "halo",
        backend: str | None = None,
    ) -> None:
        super().__init__()
        k_channels = in_channels if k_channels is None else k_channels
        out_channels = in_channels if out_channels is None else out_channels
        self.num_heads = num_heads
        self.backend = backend
        self.mesh = ProcessMesh() if mesh is None else mesh
        with self.mesh.alike() as facts:
            for name, channels in (("k_channels", k_channels), ("out_channels", out_channels)):
                if channels < 1:
                    raise ValueError(f"{name} must be at least 1, got {channels}")
                if num_heads < 1 or channels % num_heads:
                    raise ValueError(f"num_heads={num_heads} does not divide {name}={channels}; choose one that does")
            self.scale = (k_channels // num_heads) ** -0.5 if scale is None else scale
            resolve_backend(backend, torch.device("cpu"))
            self.neighbourhood = Neighbourhood(grid_in, grid_out, theta_cutoff)
            self.keys = Decomposition(self.neighbourhood.grid_in, self.mesh)
            self.queries = Decomposition(self.neighbourhood.grid_out, self.mesh)
            self.exchange = make_exchange(exchange, self.neighbourhood, self.keys, self.queries)
            facts["mesh"] = self.mesh, self.mesh.row_balance
            facts["neighbourhood"] = self.neighbourhood, f"checksum {self.neighbourhood.checksum}"
            facts["exchange"] = exchange
            facts["channels"] = in_channels, k_channels, out_channels, num_heads
            facts["settings"] = f"bias={bias}, qk_norm={qk_norm}, scale={self.scale}, backend={backend}"

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns, 1, 1))

        def vector(size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size))

        self.q_weights = matrix(k_channels, in_channels)
        self.k_weights = matrix(k_channels, in_channels)
        self.v_weights = matrix(out_channels, in_channels)
        self.proj_weights = matrix(out_channels, out_channels)
        self.q_bias = vector(k_channels) if bias else None
        self.k_bias = vector(k_channels) if bias else None
        self.v_bias = vector(out_channels) if bias else None
        self.proj_bias = vector(out_channels) if bias else None
        self.q_norm_weights = vector(k_channels // num_heads) if qk_norm else None
        self.k_norm_weights = vector(k_channels // num_heads) if qk_norm else None
        self.register_forward_pre_hook(SameWeights(self.mesh))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform weights of variance 2 / (fan in + fan out) (X. Glorot, Y. Bengio, 2010), zero biases."""
        for parameter in self.parameters():
            if parameter.ndim == 4:
                bound = math.sqrt(6.0 / (parameter.shape[0] + parameter.shape[1]))
                nn.init.uniform_(parameter, -bound, bound)
            else:
                nn.init.zeros_(parameter)

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        """query [B, C, nlat_out, nlon_out]; key, value [B, C, nlat_in, nlon_in], the query by default.

        Returns [B, out_channels, nlat_out, nlon_out]; all of them this process's tile of the fields.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._check(query, key, value)
        q = self._heads(query, self.q_weights, self.q_bias, self.q_norm_weights) * self.scale
        k = self._heads(key, self.k_weights, self.k_bias, self.k_norm_weights)
        v = self._heads(value, self.v_weights, self.v_bias, None)
        y = self.exchange(q, k, v, self.backend)
        return F.linear(merge_heads(y), self.proj_weights.flatten(1), self.proj_bias).movedim(-1, 1)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """``ValueError`` on all processes alike for fields that fit no tile or differ between processes."""
        fields = ("query", query, self.queries), ("key", key, self.keys), ("value", value, self.keys)
        with self.mesh.alike() as facts:
            facts["dtype of the weights"] = self.q_weights.dtype
            facts["trained parameters"] = [name for name, p in self.named_parameters() if p.requires_grad]
            facts["gradients"] = torch.is_grad_enabled()
            for name, field, tile in fields:
                tile.check(field, name)
                computed_in = as_autocast(field[:0]).dtype
                facts[name] = tuple(field.shape[:2]), field.dtype, computed_in, field.requires_grad

    def _heads(self, field: Tensor, weights: Tensor, bias: Tensor | None, norm_weights: Tensor | None) -> Tensor:
        """[B, C, H, W] -> [B, N, H, W, D], mapped over the channels and normalised where asked."""
        mapped = F.linear(field.movedim(1, -1), weights.flatten(1), bias)
        heads = split_heads(mapped, self.num_heads, "field")
        return heads if norm_weights is None else F.rms_norm(heads, norm_weights.shape, weight=1.0 + norm_weights)

    def extra_repr(self) -> str:
        return f"{self.neighbourhood}, num_heads={self.num_heads}"
