"""The agent-environment loops."""

from ludic.interaction.base import InteractionProtocol, RunSpec, Runtime
from ludic.interaction.collector import AgentTrack
from ludic.interaction.delegating import DelegatingProtocol, SubAgent, SubtaskEnv
from ludic.interaction.episode import Episode, begin_agent, take_turn
from ludic.interaction.multi_agent import (
    Bot,
    FunctionBot,
    MultiAgentProtocol,
    RandomBot,
    SequenceBot,
)
from ludic.interaction.program import ProgramAttempt, ProgramProtocol
from ludic.interaction.single_agent import SingleAgentSyncProtocol

__all__ = [
    "AgentTrack",
    "Bot",
    "DelegatingProtocol",
    "Episode",
    "FunctionBot",
    "InteractionProtocol",
    "MultiAgentProtocol",
    "ProgramAttempt",
    "ProgramProtocol",
    "RandomBot",
    "RunSpec",
    "Runtime",
    "SequenceBot",
    "SingleAgentSyncProtocol",
    "SubAgent",
    "SubtaskEnv",
    "begin_agent",
    "take_turn",
]
