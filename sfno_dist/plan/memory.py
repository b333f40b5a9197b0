"""Bytes of tensors that live at once, counted as a program runs: with values, or with sizes alone."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """``held`` now and ``peak`` so far: bytes of the tensors made in this context.

    ``made`` counts them by (layer that made it, shape, bytes); those of backward have no layer.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.made: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._inside: list[str] = []
        for name, layer in model.named_modules():
            layer.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name or "model"))
            layer.register_forward_hook(self._left, always_call=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage not in given and storage not in self._known:
                    self._enter(storage, tuple(leaf.shape))
        self.peak = max(self.peak, self.held)
        return result

    def _left(self, *_: Any) -> None:
        self._inside.pop()

    def _enter(self, storage: torch.UntypedStorage, shape: tuple[int, ...]) -> None:
        size = storage.nbytes()
        self._known.add(storage)
        self.held += size
        self.made[self._inside[-1] if self._inside else "backward and loss", shape, size] += 1
        weakref.finalize(storage, self._leave, size)

    def _leave(self, size: int) -> None:
        self.held -= size
