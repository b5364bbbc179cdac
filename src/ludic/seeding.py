"""Seeds as a plan: every random choice of a run has a seed derived from its place in it."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from ludic.errors import ConfigError

_NOTHING_YET = blake2b(digest_size=8)


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
