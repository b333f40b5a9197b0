"""Processes that share a globe must start from the same weights; a difference would only show in the results."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from sfno_dist.mesh import ProcessMesh


class SameWeights:
    """A forward pre-hook: ``ValueError`` on all processes where weights differ at the first call.

    Later ones are not compared: what starts alike stays alike, since gradients are summed over the globe.
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        self.mesh, self.known = mesh, mesh.globe_size == 1 or mesh.paper

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not self.known:
            self.mesh.agree({"weights": checksum(module)})
            self.known = True


@torch.compiler.disable
def checksum(module: nn.Module) -> str:
    """Of all parameters, to the last bit."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(str(parameter.dtype).encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"checksum {digest.hexdigest()[:12]} (start all processes from the same seed or state dict)"
