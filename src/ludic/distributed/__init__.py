"""Bringing weights to samplers, and training on several ranks. Names that need torch load late."""

from ludic.plumbing.lazy import late_names

__getattr__, __all__ = late_names(__name__, __file__)


def __dir__() -> list[str]:
    return __all__
