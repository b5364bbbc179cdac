"""Ludic: train LLM agents with reinforcement learning.

The LLM is the policy, the environment gives the rewards, and an algorithm is a credit assigner
plus a loss. `ludic.train(Guess, model="tiny")` is a whole run; the parts live in their own
modules: `ludic.envs`, `ludic.agents`, `ludic.interaction`, `ludic.rollouts`, `ludic.training` ….
Importing this package is cheap and takes no torch.
"""

import os

from ludic.plumbing.lazy import late_names

__version__ = "0.1.0.dev0"

__getattr__, __dir__, __all__ = late_names(__name__, __file__)

if os.environ.get("LUDIC_CHECK_SHAPES", "0") not in ("", "0"):
    from ludic.plumbing.shapes import check_shapes

    check_shapes()
