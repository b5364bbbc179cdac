"""Agents that are programs: a server for them to ask, and what becomes of their requests."""

from ludic.plumbing.lazy import late_names

__getattr__, __dir__, __all__ = late_names(__name__, __file__)
