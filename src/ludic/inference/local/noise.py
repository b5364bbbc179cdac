"""Noise keyed by request and position: a hash, and no generator with a state.

One uniform number is enough for one token (the sampler inverts the distribution function), so the
noise of a request is the same however it is batched, and on every device.
"""

from __future__ import annotations

from torch import Tensor

from ludic.seeding import derive_seed

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


def noise_key(seed: int) -> int:
    """The 63-bit key of a request's noise, for a seed of any size and sign."""
    return derive_seed(seed, "noise")


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def keyed_uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform float64 in [0, 1), a pure function of (key, position): splitmix64's output step.

    Both are int64 of one shape. Multiplication wraps around, the same on every device.
    """
    x = keys + (positions + 1) * GOLDEN
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).double() * 2.0**-53
