"""Inference: the client's contract, sampling, chat templates, tool parsers, and the backends.

Backends are imported on first use, so that `import ludic.inference` needs neither torch nor
transformers nor aiohttp.
"""

from ludic.plumbing.lazy import late_names

__getattr__, __dir__, __all__ = late_names(__name__, __file__)
