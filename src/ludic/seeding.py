"""Seeds as a plan: every random choice of a run has a seed derived from its place in it.

Noise is keyed by seed and position: a hash, and no generator with a state. One uniform number is
enough for one token (the sampler inverts the distribution function), so the noise of a request is
the same however it is batched, and on every device.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from ludic.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_NOTHING_YET = blake2b(digest_size=8)
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


def derive_seed(root: int, *path: int | str) -> int:
    """The seed of the place `path` under `root`: 63 bits of blake2b.

    Different paths give independent seeds; the same path always gives the same one.
    Integers and strings are told apart, so `1` and `"1"` are different places.

    >>> derive_seed(0, "episode", 3) == derive_seed(0, "episode", 3)
    True
    >>> derive_seed(0, "episode", 3) == derive_seed(0, "episode", 4)
    False
    """
    try:
        spelled = _spelled(root) + _spelled_path(*path)
    except TypeError:  # a part that cannot be kept, such as a list: `_spelled` says which
        spelled = b"".join(map(_spelled, (root, *path)))
    hashed = _NOTHING_YET.copy()  # at a third of what making one costs
    hashed.update(spelled)
    return int.from_bytes(hashed.digest(), "little") >> 1


def derived(root: int | None, *path: int | str) -> int | None:
    """`derive_seed`, but without a root there is no seed either."""
    return None if root is None else derive_seed(root, *path)


@lru_cache(maxsize=1024, typed=True)
def _spelled_path(*path: int | str) -> bytes:
    """Most paths recur under many roots."""
    return b"".join(map(_spelled, path))


def _spelled(part: int | str) -> bytes:
    if type(part) is int or (isinstance(part, int) and not isinstance(part, bool)):
        data = b"i%d" % part
    elif isinstance(part, str):
        data = b"s" + part.encode("utf-8", "surrogatepass")
    else:
        raise ConfigError(f"a seed is derived from integers and text, not from {part!r}")
    return len(data).to_bytes(4, "little") + data


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
