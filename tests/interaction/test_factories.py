from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ludic.agents import ReActAgent
from ludic.context import WindowedDialog
from ludic.envs.tic_tac_toe import TicTacToeEnv, TwoPlayerTicTacToeEnv
from ludic.errors import ConfigError, UnknownNameError
from ludic.interaction import (
    DelegatingProtocol,
    MultiAgentProtocol,
    RunSpec,
    SingleAgentSyncProtocol,
)
from ludic.registry import (
    make_protocol,
    register_agent,
    register_tool,
    unregister_agent,
    unregister_tool,
)
from tests.agents.scripted import move, scripted_runtime, tool_call
from tests.interaction.worlds import Countdown

MOVE = {"kind": "xml", "tag": "move"}


@pytest.fixture
def adding() -> Iterator[None]:
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    register_tool("test_add", add)
    yield
    unregister_tool("test_add")


def as_json(**kwargs: Any) -> Any:
    """As the arguments come out of a run file."""
    return json.loads(json.dumps(kwargs))


async def test_a_single_agent_protocol_is_made_from_json(adding: None) -> None:
    runtime = scripted_runtime([tool_call("add", a=1, b=2), move("3")])
    protocol = make_protocol(
        "single_agent",
        runtime,
        **as_json(
            agent="react",
            parser=MOVE,
            context={"kind": "windowed", "max_turns": 3},
            system_prompt="Add.",
            tools=["test_add"],
            max_rounds=2,
        ),
    )
    assert isinstance(protocol, SingleAgentSyncProtocol)
    assert isinstance(protocol.agent, ReActAgent)
    assert isinstance(protocol.agent.ctx, WindowedDialog)
    (rollout,) = await protocol.run(Countdown(1), RunSpec("e"))
    assert rollout.env_steps[0].action == "3"
    assert rollout.agent_steps[0].tool_messages[0]["content"].startswith("3")


async def test_the_defaults_play_with_the_environments_own_system_prompt() -> None:
    protocol = make_protocol("single_agent", scripted_runtime(["B2"]))
    (rollout,) = await protocol.run(TicTacToeEnv(), RunSpec("e", env_seed=1, max_steps=1))
    assert rollout.env_steps[0].action == "B2"
    assert "Tic-Tac-Toe" in rollout.agent_steps[0].new_messages[0]["content"]


async def test_seats_are_bots_other_clients_or_the_policy() -> None:
    opponent = scripted_runtime([move("A2"), move("B2")])
    runtime = replace(
        scripted_runtime([move("A1"), move("B1"), move("C1")]), others={"opponent": opponent}
    )
    seats: dict[str, Any] = {"O": {"client": "opponent"}}
    protocol = make_protocol("multi_agent", runtime, **as_json(parser=MOVE, seats=seats))
    assert isinstance(protocol, MultiAgentProtocol)
    (rollout,) = await protocol.run(TwoPlayerTicTacToeEnv(), RunSpec("e"))
    assert rollout.agent_id == "X"
    assert rollout.total_reward == 1.0
    assert opponent.client.calls == 2  # type: ignore[attr-defined]

    seats = {"O": {"client": "opponent", "collect": True}}
    protocol = make_protocol("multi_agent", runtime, **as_json(parser=MOVE, seats=seats))
    assert len(await protocol.run(TwoPlayerTicTacToeEnv(), RunSpec("e2"))) == 2


@pytest.mark.parametrize(
    "seat",
    [
        {"bot": "sequence", "actions": ["A2", "B2"]},
        {"bot": "random", "choices": ["A2"]},
        {"bot": "test_bot", "start": "A2"},
    ],
)
async def test_a_bot_is_made_by_name(seat: dict[str, Any]) -> None:
    def make_bot(start: str) -> Any:
        return lambda obs: start if start in obs.rpartition("Free: ")[2] else "B2"

    register_agent("test_bot", make_bot)
    try:
        runtime = scripted_runtime([move("A1"), move("B1"), move("C1")])
        protocol = make_protocol("multi_agent", runtime, parser=MOVE, seats={"O": seat})
        rollouts = await protocol.run(TwoPlayerTicTacToeEnv(), RunSpec("e", env_seed=1))
        assert [r.agent_id for r in rollouts] == ["X"]
        assert rollouts[0].terminated
    finally:
        unregister_agent("test_bot")


async def test_a_delegating_protocol_is_made_from_json() -> None:
    def say(call: Any) -> str:
        if "1 left" in call.text:
            return tool_call("solver", task="2 + 2") if call.index == 0 else move("done")
        return move("4")

    protocol = make_protocol(
        "delegating",
        scripted_runtime(say),
        **as_json(
            parser=MOVE,
            sub_agents={
                "solver": {"description": "Solves sums.", "parser": MOVE, "agent": "agent"}
            },
        ),
    )
    assert isinstance(protocol, DelegatingProtocol)
    parent, child = await protocol.run(Countdown(1), RunSpec("e"))
    assert parent.agent_steps[0].tool_messages[0]["content"] == "4"
    assert child.parent_id == parent.id


@pytest.mark.parametrize(
    ("kwargs", "error", "complaint"),
    [
        ({"agent": "raect"}, UnknownNameError, "did you mean 'react'"),
        ({"parser": "xlm"}, UnknownNameError, "'xml'"),
        ({"context": "full"}, UnknownNameError, "'full_dialog'"),
        ({"tools": ["no_such_tool"]}, UnknownNameError, "no_such_tool"),
        ({"client": "judge"}, UnknownNameError, "judge"),
        ({"colour": "red"}, ConfigError, "colour"),
    ],
)
def test_what_cannot_be_made_says_so(
    kwargs: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        make_protocol("single_agent", scripted_runtime(["x"]), **kwargs)


def test_a_sub_agent_needs_a_description() -> None:
    with pytest.raises(ConfigError, match="needs a 'description'"):
        make_protocol("delegating", scripted_runtime(["x"]), sub_agents={"solver": {}})


def test_a_bot_with_wrong_arguments_says_which() -> None:
    with pytest.raises(ConfigError, match="seat 'O': bot 'random' cannot be made"):
        make_protocol("multi_agent", scripted_runtime(["x"]), seats={"O": {"bot": "random"}})
