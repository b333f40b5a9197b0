"""Random numbers as a function of where they are used: equal inputs give equal bits, in any order and on any tile.

Philox-4x32 with 10 rounds (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). PyTorch's own
generators keep a state or number the elements of a tensor, so that what a cell gets would depend on its tile.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF

Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words for each counter. Words are int64 that hold 32 bits each; all of them broadcast."""
    a, b, c, d = counter
    left, right = key
    for _ in range(ROUNDS):
        # p = x m - x 2^32 stays within 63 bits, where x m itself need not: compilers count on int64 never to overflow.
        first, second = a * (MULTIPLIERS[0] - 2**32), c * (MULTIPLIERS[1] - 2**32)
        high, other_high = (first >> 32) + a, (second >> 32) + c
        a, b, c, d = other_high ^ b ^ left, second & WORD, high ^ d ^ right, first & WORD
        left, right = (left + KEY_STEPS[0]) & WORD, (right + KEY_STEPS[1]) & WORD
    return a, b, c, d


def uniform(words: Tensor) -> Tensor:
    """float64 in the open interval (0, 1), evenly spaced, from 32-bit words."""
    return (words.double() + 0.5) * 2.0**-32


def normal(words: Words) -> Words:
    """Four independent standard normal float64 from four words (G. Box, M. Muller, 1958)."""
    a, b, c, d = (uniform(word) for word in words)
    # float64, so that a last bit that depends on how a processor vectorises the logarithm is gone in float32
    radius, other_radius = (torch.sqrt(-2.0 * torch.log(u)) for u in (a, c))
    angle, other_angle = (2.0 * math.pi * u for u in (b, d))
    return (
        radius * torch.cos(angle),
        radius * torch.sin(angle),
        other_radius * torch.cos(other_angle),
        other_radius * torch.sin(other_angle),
    )
