"""Ludic: train LLM agents with reinforcement learning.

The LLM is the policy, the environment gives the rewards, and an algorithm is a credit assigner
plus a loss. `ludic.train(Guess, model="tiny")` is a whole run; the parts live in their own
modules: `ludic.envs`, `ludic.agents`, `ludic.interaction`, `ludic.rollouts`, `ludic.training` ….
Importing this package is cheap and takes no torch.
"""

from typing import TYPE_CHECKING

from ludic.lazy import late_names
from ludic.registry import (
    get_tool,
    list_agents,
    list_envs,
    list_protocols,
    list_tools,
    make_agent,
    make_env,
    make_protocol,
    register_agent,
    register_algorithm,
    register_env,
    register_parser,
    register_protocol,
    register_tool,
)
from ludic.seeding import derive_seed
from ludic.types import (
    AgentStep,
    ChatResponse,
    EnvironmentStep,
    EnvSpec,
    Message,
    ProtocolSpec,
    Rollout,
    Step,
    StepOutcome,
    TokenTrace,
)

if TYPE_CHECKING:
    from ludic.envs.env import LudicEnv as LudicEnv
    from ludic.envs.single_agent_env import SingleAgentEnv as SingleAgentEnv
    from ludic.parsers import boxed_parser as boxed_parser
    from ludic.parsers import compose_parsers as compose_parsers
    from ludic.parsers import json_parser as json_parser
    from ludic.parsers import regex_parser as regex_parser
    from ludic.parsers import text_parser as text_parser
    from ludic.parsers import think_prefix_parser as think_prefix_parser
    from ludic.parsers import xml_parser as xml_parser
    from ludic.runs.front_door import evaluate as evaluate
    from ludic.runs.front_door import play as play
    from ludic.runs.front_door import resume as resume
    from ludic.runs.front_door import sft as sft
    from ludic.runs.front_door import train as train
    from ludic.runs.run import Run as Run
    from ludic.training.algorithms.cispo import make_cispo as cispo
    from ludic.training.algorithms.dr_grpo import make_dr_grpo as dr_grpo
    from ludic.training.algorithms.gmpo import make_gmpo as gmpo
    from ludic.training.algorithms.grpo import make_grpo as grpo
    from ludic.training.algorithms.gspo import make_gspo as gspo
    from ludic.training.algorithms.opd import make_opd as opd
    from ludic.training.algorithms.reinforce import make_reinforce as reinforce
    from ludic.training.algorithms.reinforce_baseline import (
        make_reinforce_baseline as reinforce_baseline,
    )
    from ludic.training.algorithms.sapo import make_sapo as sapo
    from ludic.training.algorithms.scalerl import make_scalerl as scalerl
    from ludic.training.algorithms.spo import make_spo as spo

__version__ = "0.1.0.dev0"

_FRONT_DOOR = ("evaluate", "play", "resume", "sft", "train")
_PRESETS = (
    *("cispo", "dr_grpo", "gmpo", "grpo", "gspo", "opd", "reinforce", "reinforce_baseline"),
    *("sapo", "scalerl", "spo"),
)
_PARSERS = (
    *("boxed_parser", "compose_parsers", "json_parser", "regex_parser", "text_parser"),
    *("think_prefix_parser", "xml_parser"),
)
_WHERE = {
    "LudicEnv": "ludic.envs.env",
    "SingleAgentEnv": "ludic.envs.single_agent_env",
    "Run": "ludic.runs.run",
    **dict.fromkeys(_FRONT_DOOR, "ludic.runs.front_door"),
    **dict.fromkeys(_PARSERS, "ludic.parsers"),
    **{name: f"ludic.training.algorithms.{name}:make_{name}" for name in _PRESETS},
}

__all__ = [
    "AgentStep",
    "ChatResponse",
    "EnvSpec",
    "EnvironmentStep",
    "LudicEnv",
    "Message",
    "ProtocolSpec",
    "Rollout",
    "Run",
    "SingleAgentEnv",
    "Step",
    "StepOutcome",
    "TokenTrace",
    "boxed_parser",
    "cispo",
    "compose_parsers",
    "derive_seed",
    "dr_grpo",
    "evaluate",
    "get_tool",
    "gmpo",
    "grpo",
    "gspo",
    "json_parser",
    "list_agents",
    "list_envs",
    "list_protocols",
    "list_tools",
    "make_agent",
    "make_env",
    "make_protocol",
    "opd",
    "play",
    "regex_parser",
    "register_agent",
    "register_algorithm",
    "register_env",
    "register_parser",
    "register_protocol",
    "register_tool",
    "reinforce",
    "reinforce_baseline",
    "resume",
    "sapo",
    "scalerl",
    "sft",
    "spo",
    "text_parser",
    "think_prefix_parser",
    "train",
    "xml_parser",
]

__getattr__ = late_names(__name__, _WHERE)


def __dir__() -> list[str]:
    return __all__
