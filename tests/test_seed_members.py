"""A class with the members that the founding documents name, and no others, is whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ludic.agents import ToolAgent
from ludic.context import ContextStrategy
from ludic.envs import EnvRunner, LudicEnv, SingleAgentEnv
from ludic.types import Message, StepOutcome
from tests.agents.scripted import move, scripted_agent, tool_call


class Kernel(LudicEnv[str, str, str]):
    agent_ids = ("agent",)
    active_agents = ("agent",)

    def reset(self, *, seed: int | None = None) -> Any:
        return {"agent": ("Say it.", {})}

    def step(self, actions: Any) -> Any:
        return {"agent": StepOutcome("", float(actions["agent"] == "it"), terminated=True)}


class Single(SingleAgentEnv):
    def env_reset(self, *, seed: int | None = None) -> Any:
        return "Say it.", {}

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("", float(action == "it"), terminated=True)


async def test_an_environment_with_the_four_members_of_the_kernel_is_played() -> None:
    for env in (Kernel(), Single()):
        runner = EnvRunner(env)
        assert (await runner.reset(1))["agent"][0] == "Say it."
        assert (await runner.step({"agent": "it"}))["agent"].reward == 1.0
        assert env.current_obs() in ({}, {"agent": ""})
        await runner.close()


class Memory(ContextStrategy):
    def reset(self, system_prompt: str | None = None) -> None:
        self.messages: list[Message] = []

    def on_env_reset(self, obs: str, info: Any) -> None:
        self.messages.append({"role": "user", "content": obs})

    def on_before_act(self) -> Sequence[Message]:
        return tuple(self.messages)

    def on_after_act(self, message: Message) -> None:
        self.messages.append(message)

    def on_after_step(self, obs: str, info: Any) -> None:
        self.messages.append({"role": "user", "content": obs})


def double(n: int) -> int:
    """Twice n."""
    return 2 * n


async def test_a_context_with_the_five_hooks_remembers_tools_as_observations() -> None:
    memory = Memory()
    script = [tool_call("double", n=4), move("8")]
    agent = scripted_agent(script, ToolAgent, ctx=memory, tools=[double])
    agent.reset(seed=0)
    agent.on_env_reset("What is twice four?", {})
    result = await agent.act()
    assert result.parse.action == "8"
    assert [m["content"] for m in memory.messages if m["role"] == "user"][1:] == ["8"]
