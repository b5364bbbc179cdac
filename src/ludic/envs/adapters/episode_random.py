"""Global generators, one per episode: for packages that draw from `random` and NumPy directly.

Such a package seeds and uses the generators of the whole process, so that two of its episodes, and
everything else that draws from them, would disturb each other. `give_own_random` replaces the names
`random`, `numpy` and `np` in the package's modules by stand-ins. Within `drawn_from` of an
`EpisodeRandom` these lead to that episode's generators, in that thread and in no other; outside, to
the real ones.
"""

from __future__ import annotations

import random
import sys
import threading
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import numpy as np

from ludic.plumbing.contexts import holding

_now: ContextVar[EpisodeRandom | None] = ContextVar("episode_random", default=None)
_replacing = threading.Lock()


class EpisodeRandom:
    """The generators of one episode. `seed=None` takes the system's entropy."""

    def __init__(self, seed: int | None = None) -> None:
        self.python = random.Random(seed)
        words = None if seed is None else [seed >> shift & 0xFFFFFFFF for shift in (0, 32)]
        self.numpy = np.random.RandomState(words)

    def drawn_from(self) -> AbstractContextManager[None]:
        """Within it, the package draws from this episode's generators."""
        return holding(_now, self)


class _Random:
    """Stands for the module `random`."""

    def __getattr__(self, name: str) -> Any:
        own = getattr(_now.get(), "python", random)
        return getattr(own if hasattr(own, name) else random, name)


class _NumpyRandom:
    """Stands for `numpy.random`."""

    def __getattr__(self, name: str) -> Any:
        own = getattr(_now.get(), "numpy", np.random)
        if own is not np.random and name == "default_rng":
            return self._default_rng
        return getattr(own if hasattr(own, name) else np.random, name)

    @staticmethod
    def _default_rng(seed: Any = None) -> np.random.Generator:
        episode = _now.get()
        if seed is None and episode is not None:
            seed = episode.python.getrandbits(64)
        return np.random.default_rng(seed)


class _Numpy:
    """Stands for the module `numpy`."""

    random = _NumpyRandom()

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


_STAND_INS: dict[int, Any] = {id(random): _Random(), id(np): _Numpy()}


def give_own_random(package: str) -> None:
    """Puts the stand-ins into those modules of `package` that are imported by now. Safe to repeat,
    from any thread."""
    with _replacing:
        for name, module in list(sys.modules.items()):
            if module is None or not (name == package or name.startswith(f"{package}.")):
                continue
            for attribute in ("random", "numpy", "np"):
                stand_in = _STAND_INS.get(id(vars(module).get(attribute)))
                if stand_in is not None:
                    setattr(module, attribute, stand_in)
