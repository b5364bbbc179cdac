"""The environment contract, the built-in environments, and what runs them.

The built-in environments are imported when they are first asked for, so that each can also be
run as a program (`python -m ludic.envs.tic_tac_toe`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ludic.envs.env import LudicEnv
from ludic.envs.running.runner import EnvRunner
from ludic.envs.single_agent_env import SingleAgentEnv

if TYPE_CHECKING:
    from ludic.envs.dataset_qa_env import DatasetQAEnv
    from ludic.envs.gsm8k import GSM8KEnv
    from ludic.envs.key_door import KeyDoorEnv
    from ludic.envs.math import MATHEnv
    from ludic.envs.running.process import ProcessEnv, build_env
    from ludic.envs.tic_tac_toe import TicTacToeEnv, TwoPlayerTicTacToeEnv

_LAZY = {
    "DatasetQAEnv": "dataset_qa_env",
    "GSM8KEnv": "gsm8k",
    "KeyDoorEnv": "key_door",
    "MATHEnv": "math",
    "ProcessEnv": "running.process",
    "TicTacToeEnv": "tic_tac_toe",
    "TwoPlayerTicTacToeEnv": "tic_tac_toe",
    "build_env": "running.process",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


__all__ = [
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
