"""Ludic: train LLM agents with reinforcement learning.

The LLM is the policy, the environment gives the rewards, and an algorithm is a credit assigner
plus a loss. Importing this package is cheap and takes no torch; the parts live in their own
modules: `ludic.envs`, `ludic.agents`, `ludic.interaction`, `ludic.rollouts`, `ludic.training` ….
"""

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
    register_env,
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

__version__ = "0.1.0.dev0"

__all__ = [
    "AgentStep",
    "ChatResponse",
    "EnvSpec",
    "EnvironmentStep",
    "Message",
    "ProtocolSpec",
    "Rollout",
    "Step",
    "StepOutcome",
    "TokenTrace",
    "derive_seed",
    "get_tool",
    "list_agents",
    "list_envs",
    "list_protocols",
    "list_tools",
    "make_agent",
    "make_env",
    "make_protocol",
    "register_agent",
    "register_env",
    "register_protocol",
    "register_tool",
]
