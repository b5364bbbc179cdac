"""An import path for the rollout engine, which lives in `ludic.rollouts.engine`."""

from ludic.rollouts.engine import RolloutEngine as RolloutEngine
