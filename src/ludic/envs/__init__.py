"""Environments: the contract, the built-in ones, and what calls them.

`env` is the contract. Derive from `SingleAgentEnv` for a task with one agent, from `DatasetQAEnv`
for questions with answers to be judged. The other modules here are the built-in environments, to
read and to copy from; `running/` holds what calls an environment, which a new one never needs.
"""

from ludic.envs.code_exec.env import CodeExecEnv
from ludic.envs.dataset_qa_env import DatasetQAEnv
from ludic.envs.datasets.gsm8k import GSM8KEnv
from ludic.envs.datasets.math import MATHEnv
from ludic.envs.env import LudicEnv
from ludic.envs.key_door import KeyDoorEnv
from ludic.envs.running.process import ProcessEnv, build_env
from ludic.envs.running.runner import EnvRunner
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.envs.tic_tac_toe import TicTacToeEnv, TwoPlayerTicTacToeEnv

__all__ = [
    "CodeExecEnv",
    "DatasetQAEnv",
    "EnvRunner",
    "GSM8KEnv",
    "KeyDoorEnv",
    "LudicEnv",
    "MATHEnv",
    "ProcessEnv",
    "SingleAgentEnv",
    "TicTacToeEnv",
    "TwoPlayerTicTacToeEnv",
    "build_env",
]
