"""The contract of a protocol: the loop between agents and an environment, outside of both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.inference.client import ChatClient
from ludic.inference.sampling import InferenceSpec
from ludic.inference.templates.chat_template import ChatTemplate
from ludic.plumbing.records import Record
from ludic.types import Rollout


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a protocol's factory is given to build agents with. `others` are further clients by
    name, for opponents, judges and teachers that are not the policy being trained."""

    client: ChatClient
    chat_template: ChatTemplate
    model: str
    inference: InferenceSpec = field(default_factory=InferenceSpec)
    others: Mapping[str, Runtime] = field(default_factory=dict)


class RunSpec(Record, frozen=True):
    """What one episode is run with. Seeds come from the run's plan; ids name the rollouts."""

    episode_id: str
    env_seed: int | None = None
    sampling_seed: int | None = None
    max_steps: int = 100
    step_timeout_s: float | None = 60.0
    episode_timeout_s: float | None = 600.0


class InteractionProtocol(ABC):
    """Runs one episode and returns one rollout per agent that took part.

    A protocol uses only the public methods of agents and environments. It does not raise for
    what happens inside an episode: a failing environment, tool or request ends the episode, and
    the rollouts gathered so far are returned with `error` set and the last step truncated with
    `TruncationReason.ERROR`. Only cancellation and errors of configuration propagate.
    """

    @abstractmethod
    async def run(self, env: LudicEnv[Any, Any, Any], spec: RunSpec) -> list[Rollout]:
        """One episode. `max_steps` bounds the environment steps of the episode; steps that were
        not taken because of parse failures count too."""
