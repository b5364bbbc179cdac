from __future__ import annotations

from collections.abc import Sequence

from ludic.agents import Tool, ToolAgent
from ludic.errors import AgentError
from ludic.interaction import RunSpec, SingleAgentSyncProtocol
from ludic.types import Rollout
from tests.agents.scripted import move, scripted_agent, tool_call
from tests.interaction.worlds import Countdown


class Source:
    """Tools that count how often they were opened and closed."""

    def __init__(self, *, fails: bool = False, raises_at_close: bool = False) -> None:
        self.fails, self.raises_at_close = fails, raises_at_close
        self.opened = self.closed = 0

    async def open(self) -> Source:
        if self.fails:
            raise AgentError("nobody is there")
        self.opened += 1
        return self

    @property
    def tools(self) -> Sequence[Tool]:
        def times(a: int, b: int) -> int:
            """Multiplies."""
            return a * b

        return [Tool.of(times)]

    async def close(self) -> None:
        self.closed += 1
        if self.raises_at_close:
            raise OSError("it was gone")


async def play(agent: ToolAgent, steps: int = 1) -> Rollout:
    protocol = SingleAgentSyncProtocol(agent)
    (rollout,) = await protocol.run(Countdown(steps), RunSpec("e", env_seed=1, sampling_seed=1))
    return rollout


async def test_a_source_is_opened_once_per_episode_and_closed_at_its_end() -> None:
    source = Source()
    script = [tool_call("times", a=6, b=7), move("a"), tool_call("times", a=2, b=2), move("b")]
    agent = scripted_agent(script, ToolAgent, tool_sources=[source], client={"cycle": True})
    assert source.opened == 0
    rollout = await play(agent, steps=2)
    answers = [m["content"] for s in rollout.agent_steps for m in s.tool_messages]
    assert answers == ["42", "4"]
    assert (source.opened, source.closed) == (1, 1)
    assert (await play(agent, steps=2)).error is None
    assert (source.opened, source.closed) == (2, 2)


async def test_a_source_that_does_not_open_costs_the_episode_and_the_others_are_closed() -> None:
    good, bad = Source(), Source(fails=True)
    agent = scripted_agent([move("a")], ToolAgent, tool_sources=[good, bad])
    rollout = await play(agent)
    assert rollout.error is not None
    assert rollout.error.startswith("AgentError: nobody is there (")
    assert (good.opened, good.closed) == (1, 1)


async def test_what_goes_wrong_at_the_closing_does_not_touch_the_episode() -> None:
    source = Source(raises_at_close=True)
    rollout = await play(scripted_agent([move("a")], ToolAgent, tool_sources=[source]))
    assert rollout.error is None
    assert rollout.terminated
    assert source.closed == 1
