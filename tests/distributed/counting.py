"""What leaves PyTorch for other processes, and what tensors take in memory, counted beside the product."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextlib.contextmanager
def received_messages() -> Iterator[list[torch.Tensor]]:
    """Tensors that messages from other processes fill, in order."""
    messages: list[torch.Tensor] = []
    plain = dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
        messages.extend(o.tensor for o in operations if o.op is dist.irecv)
        return plain(operations)

    dist.batch_isend_irecv = counting
    try:
        yield messages
    finally:
        dist.batch_isend_irecv = plain


class PeakMemory(TorchDispatchMode):
    """``peak``: most bytes that tensors made in this context held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage() not in known | set(self.known):
                storage = leaf.untyped_storage()
                self.known.add(storage)
                self.held += storage.nbytes()
                weakref.finalize(storage, self._released, storage.nbytes())
        self.peak = max(self.peak, self.held)
        return result

    def _released(self, size: int) -> None:
        self.held -= size
