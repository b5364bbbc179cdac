"""Environments: the contract, the built-in ones, and what calls them.

`env` is the contract. Derive from `SingleAgentEnv` for a task with one agent, from `DatasetQAEnv`
for questions with answers to be judged. `key_door`, `tic_tac_toe` and others are built in, to read
and to copy from; `runner`, `outcomes` and `process` call an environment: a new one never needs
them.
"""

from ludic.envs.code_exec.env import CodeExecEnv as CodeExecEnv
from ludic.envs.dataset_qa_env import DatasetQAEnv as DatasetQAEnv
from ludic.envs.dataset_qa_env import GSM8KEnv as GSM8KEnv
from ludic.envs.dataset_qa_env import MATHEnv as MATHEnv
from ludic.envs.env import LudicEnv as LudicEnv
from ludic.envs.key_door import KeyDoorEnv as KeyDoorEnv
from ludic.envs.process import ProcessEnv as ProcessEnv
from ludic.envs.process import build_env as build_env
from ludic.envs.runner import EnvRunner as EnvRunner
from ludic.envs.single_agent_env import SingleAgentEnv as SingleAgentEnv
from ludic.envs.tic_tac_toe import TicTacToeEnv as TicTacToeEnv
from ludic.envs.tic_tac_toe import TwoPlayerTicTacToeEnv as TwoPlayerTicTacToeEnv
