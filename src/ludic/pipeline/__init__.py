"""Actors and trainer joined by Redis: every unit of work is trained on once, or dropped with a
reason.

Names are imported when they are first used, so that an actor that samples from vLLM gets by
without torch.
"""

from ludic.plumbing.lazy import late_names

__getattr__, __dir__, __all__ = late_names(__name__, __file__)
