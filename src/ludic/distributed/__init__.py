"""Publishing weights to samplers, and training on several ranks. Names that need torch load
late."""

from ludic.plumbing.lazy import late_names

__getattr__, __dir__, __all__ = late_names(__name__, __file__)
