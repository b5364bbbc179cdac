"""The rollout engine; it lives in `ludic.rollouts.engine`."""

from ludic.rollouts.engine import RolloutEngine as RolloutEngine
