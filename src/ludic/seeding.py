"""Seeds as a plan: every random choice of a run has a seed derived from its place in it."""

from __future__ import annotations

from hashlib import blake2b

from ludic.errors import ConfigError


def derive_seed(root: int, *path: int | str) -> int:
    """The seed of the place `path` under `root`: 63 bits of blake2b.

    Different paths give independent seeds; the same path always gives the same one.
    Integers and strings are told apart, so `1` and `"1"` are different places.

    >>> derive_seed(0, "episode", 3) == derive_seed(0, "episode", 3)
    True
    >>> derive_seed(0, "episode", 3) == derive_seed(0, "episode", 4)
    False
    """
    digest = blake2b(digest_size=8)
    for part in (root, *path):
        if not isinstance(part, int | str) or isinstance(part, bool):
            raise ConfigError(f"a seed is derived from integers and text, not from {part!r}")
        data = f"{'s' if isinstance(part, str) else 'i'}{part}".encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1
