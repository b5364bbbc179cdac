"""Agents that are programs: a server for them to ask, and what becomes of their requests."""

from ludic.plumbing.lazy import late_names

__getattr__, __all__ = late_names(__name__, __file__)


def __dir__() -> list[str]:
    return __all__
