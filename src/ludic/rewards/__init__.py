"""Reward functions, and when two answers are the same."""

from ludic.rewards.functions import Attempt as Attempt
from ludic.rewards.functions import RewardFn as RewardFn
from ludic.rewards.functions import RewardSpec as RewardSpec
from ludic.rewards.functions import RewardSum as RewardSum
from ludic.rewards.functions import Score as Score
from ludic.rewards.functions import exact_reward as exact_reward
from ludic.rewards.functions import format_reward as format_reward
from ludic.rewards.functions import length_reward as length_reward
from ludic.rewards.functions import make_rewards as make_rewards
from ludic.rewards.functions import numeric_reward as numeric_reward
from ludic.rewards.functions import symbolic_reward as symbolic_reward
