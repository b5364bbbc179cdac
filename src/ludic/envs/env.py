"""The environment contract.

An environment is a state-transition function with rewards. It knows nothing of models, prompts
or tokens: observations and actions are text.

    reset(seed) -> {agent_id: (obs, info)}     for every agent that sees the opening
    step({agent_id: action}) -> {agent_id: StepOutcome}
                                               for every agent that the step concerns

Exactly the `active_agents` act in a step. Each that acted gets an outcome; any other agent may get
one too, so that a loser hears that it lost. Rewards are finite. An observation of "" says nothing
to its agent. `terminated` means that the task is over for that agent, `truncated` that a limit of
the environment cut it short, and never both; a protocol has its own limits, which are not the
environment's business. After an agent's outcome is terminated or truncated, the agent does
not act, nor hear anything more, before the next `reset`. The episode is over when that holds for
all.

All randomness comes from the seed given to `reset`: the same seed and the same actions give the
same episode.

Most tasks have one agent: subclass `SingleAgentEnv`, which is this contract without the ids.

>>> from ludic.envs import SingleAgentEnv
>>> class CoinEnv(SingleAgentEnv):
...     def env_reset(self, *, seed=None):
...         self.side = "heads" if (seed or 0) % 2 else "tails"
...         return "Heads or tails?", {}
...     def env_step(self, action):
...         return StepOutcome("", reward=float(action == self.side), terminated=True)
...     def env_current_obs(self):
...         return "Heads or tails?"
>>> env = CoinEnv()
>>> env.reset(seed=1)
{'agent': ('Heads or tails?', {})}
>>> env.step({"agent": "heads"})["agent"].reward
1.0
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import ClassVar, Generic, Literal, Protocol, TypeVar, runtime_checkable

from ludic.types import Info, StepOutcome

AgentIDT = TypeVar("AgentIDT", bound=str)
ObsT = TypeVar("ObsT")
ActionT = TypeVar("ActionT")


class LudicEnv(ABC, Generic[AgentIDT, ObsT, ActionT]):
    """The multi-agent kernel. `reset` and `step` may be plain or `async` methods.

    A plain environment runs in a worker thread, since it may block; one that answers at once sets
    `blocking = False` and is built and called directly, which is cheaper. `isolation = "process"`
    puts it into a separate process, which can be killed when it hangs. An environment whose agents
    move at the same time says with `accepts_partial_actions` whether a step may go on without the
    action of one whose answer could not be parsed. An environment is never in two calls at once,
    but successive calls may come from different threads.
    """

    blocking: ClassVar[bool] = True
    isolation: ClassVar[Literal["thread", "process"]] = "thread"
    accepts_partial_actions: ClassVar[bool] = False

    @property
    @abstractmethod
    def agent_ids(self) -> Sequence[AgentIDT]:
        """Every role in the episode, in a fixed order."""

    @property
    @abstractmethod
    def active_agents(self) -> Sequence[AgentIDT]:
        """The agents that act in the next step."""

    @property
    def return_range(self) -> tuple[float, float] | None:
        """The lowest and the highest return of an episode, if they are known."""
        return None

    @abstractmethod
    def reset(
        self, *, seed: int | None = None
    ) -> Mapping[AgentIDT, tuple[ObsT, Info]] | Awaitable[Mapping[AgentIDT, tuple[ObsT, Info]]]:
        """Begins an episode; what each agent first sees."""

    @abstractmethod
    def step(
        self, actions: Mapping[AgentIDT, ActionT]
    ) -> Mapping[AgentIDT, StepOutcome] | Awaitable[Mapping[AgentIDT, StepOutcome]]:
        """Applies the active agents' actions."""

    def current_obs(self) -> Mapping[AgentIDT, ObsT]:
        """What each agent would see if it looked now; nothing where the environment cannot say."""
        return {}

    def suggested_sysprompt(self, agent_id: AgentIDT) -> str | None:
        """A system prompt that explains the task to `agent_id`; agents may use another."""
        return None

    def picture(self) -> str | None:
        """What a person at the keyboard is shown instead of the observations; None where these say
        it all."""
        return None

    def task_key(self) -> str | None:
        """A stable name of the task that the last `reset` chose (a dataset row, a level)."""
        return None

    def check_machine(self) -> None:
        """Raises if this machine lacks a program that the environment needs, with the command that
        installs it. Asked before a run begins, of an environment that was not reset."""
        return

    def close(self) -> None:
        """Frees what the environment holds. Called once, also after a failure."""


@runtime_checkable
class Killable(Protocol):
    """An environment that lives in another process."""

    def kill(self) -> None:
        """Ends the process at once. May be called from any thread, during any call."""
