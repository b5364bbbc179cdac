"""The agent-environment loops."""

from ludic.interaction.base import InteractionProtocol as InteractionProtocol
from ludic.interaction.base import RunSpec as RunSpec
from ludic.interaction.base import Runtime as Runtime
from ludic.interaction.collector import AgentTrack as AgentTrack
from ludic.interaction.delegating import DelegatingProtocol as DelegatingProtocol
from ludic.interaction.delegating import SubAgent as SubAgent
from ludic.interaction.delegating import SubtaskEnv as SubtaskEnv
from ludic.interaction.episode import Episode as Episode
from ludic.interaction.episode import begin_agent as begin_agent
from ludic.interaction.episode import take_turn as take_turn
from ludic.interaction.multi_agent import Bot as Bot
from ludic.interaction.multi_agent import FunctionBot as FunctionBot
from ludic.interaction.multi_agent import MultiAgentProtocol as MultiAgentProtocol
from ludic.interaction.multi_agent import RandomBot as RandomBot
from ludic.interaction.multi_agent import SequenceBot as SequenceBot
from ludic.interaction.program import ProgramAttempt as ProgramAttempt
from ludic.interaction.program import ProgramProtocol as ProgramProtocol
from ludic.interaction.single_agent import SingleAgentSyncProtocol as SingleAgentSyncProtocol
