"""Rollouts made by hand, with the rewards one wants."""

from __future__ import annotations

from collections.abc import Sequence

from ludic.types import (
    AgentStep,
    EnvironmentStep,
    FinishReason,
    Message,
    Rollout,
    Step,
    TokenTrace,
)


def make_rollout(
    name: str,
    rewards: Sequence[float],
    *,
    group: str | None = None,
    task: str | None = None,
    agent: str = "agent",
    parent: str | None = None,
    heard: Sequence[float] = (),
    error: str | None = None,
) -> Rollout:
    """One turn of one model call and two tokens per reward; `heard` comes after the last turn,
    from steps in which the agent did not act. Prompts extend each other."""
    steps: list[Step] = []
    prompt: tuple[int, ...] = (1, 2, 3)
    for turn, reward in enumerate(rewards):
        trace = TokenTrace(prompt, (10 + turn, 20 + turn), (-0.5, -1.0))
        said = Message(role="assistant", content="move")
        steps.append(AgentStep(turn, (), said, FinishReason.STOP, trace))
        steps.append(EnvironmentStep(turn, (len(steps) - 1,), "obs", "move", "next", reward))
        prompt = (*trace.token_ids, 4)
    for reward in heard:
        turn = max(len(rewards) - 1, 0)
        steps.append(EnvironmentStep(turn, (), "obs", None, "next", reward))
    return Rollout(
        name,
        tuple(steps),
        agent_id=agent,
        group_id=group,
        task_key=task,
        parent_id=parent,
        error=error,
    )
