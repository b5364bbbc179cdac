"""The rollout engine; it lives in `ludic.rollouts.engine`."""

from ludic.rollouts.engine import RolloutEngine

__all__ = ["RolloutEngine"]
