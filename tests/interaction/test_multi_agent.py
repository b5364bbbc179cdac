from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ludic.envs import LudicEnv
from ludic.envs.tic_tac_toe import TwoPlayerTicTacToeEnv
from ludic.errors import ConfigError, ProtocolError
from ludic.interaction import MultiAgentProtocol, RandomBot, RunSpec, SequenceBot
from ludic.types import Rollout, TruncationReason
from tests.agents.scripted import move, scripted_agent
from tests.interaction.test_single_agent import check_soundness
from tests.interaction.worlds import Duel, Endless, PartialDuel

NOTHING = "I have no idea."
X_WINS = {"X": ["A1", "B1", "C1"], "O": ["A2", "B2"]}


async def play(
    players: dict[str, Any], env: LudicEnv[Any, Any, Any], *, spec: Any = None, **kwargs: Any
) -> dict[str, Rollout]:
    run = RunSpec("e1", env_seed=3, sampling_seed=7, **(spec or {}))
    rollouts = await MultiAgentProtocol(players, **kwargs).run(env, run)
    for rollout in rollouts:
        check_soundness(rollout)
    return {r.agent_id: r for r in rollouts}


def both(left: list[str], right: list[str]) -> dict[str, Any]:
    return {"left": scripted_agent(left), "right": scripted_agent(right)}


async def test_in_a_two_player_game_the_losers_reward_and_ending_arrive_on_its_own_rollout() -> (
    None
):
    players = {a: scripted_agent([move(m) for m in moves]) for a, moves in X_WINS.items()}
    rollouts = await play(players, TwoPlayerTicTacToeEnv())
    winner, loser = rollouts["X"], rollouts["O"]
    assert winner.terminated
    assert loser.terminated
    assert winner.env_steps[-1].reward_components == {"env": 1.0, "parser": 0.25}
    last = loser.steps[-1]
    assert last.kind == "environment"
    assert last.agent_steps == (), "it heard the end, it did not act"
    assert last.action is None
    assert last.reward == -1.0
    assert last.terminated
    assert last.info["result"] == "loss"
    assert "You lose." in last.next_obs


async def test_what_is_heard_without_acting_counts_to_the_turn_before() -> None:
    players = {a: scripted_agent([move(m) for m in moves]) for a, moves in X_WINS.items()}
    loser = (await play(players, TwoPlayerTicTacToeEnv()))["O"]
    turns = list(loser.turns())
    assert [t.index for t in turns] == [0, 1]
    assert [t.reward for t in turns] == [0.25, 0.25 - 1.0]
    assert [s.turn_index for s in loser.env_steps] == [0, 0, 0, 1, 1]


async def test_a_player_is_shown_the_others_move_before_its_own() -> None:
    players = {a: scripted_agent([move(m) for m in moves]) for a, moves in X_WINS.items()}
    rollouts = await play(players, TwoPlayerTicTacToeEnv())
    shown = rollouts["O"].agent_steps[0].new_messages[-1]["content"]
    assert "Free: B1 C1 A2" in shown


async def test_every_agent_has_seeds_of_its_own() -> None:
    players = {a: scripted_agent([move(m) for m in moves]) for a, moves in X_WINS.items()}
    rollouts = await play(players, TwoPlayerTicTacToeEnv())
    seeds = [s.sampling["seed"] for r in rollouts.values() for s in r.agent_steps]
    assert len(set(seeds)) == 5


async def test_in_turns_a_failed_parse_asks_the_same_agent_again() -> None:
    script = [NOTHING, *[move(m) for m in X_WINS["X"]]]
    players = {"X": scripted_agent(script), "O": SequenceBot(X_WINS["O"])}
    rollouts = await play(players, TwoPlayerTicTacToeEnv())
    winner = rollouts["X"]
    assert [s.stepped for s in winner.env_steps if s.agent_steps] == [False, True, True, True]
    assert winner.env_steps[0].info["parse_error"] is True
    assert winner.terminated


async def test_bots_play_seats_and_leave_no_rollouts() -> None:
    players = {
        "X": scripted_agent([move(m) for m in X_WINS["X"]]),
        "O": SequenceBot(X_WINS["O"]),
    }
    rollouts = await play(players, TwoPlayerTicTacToeEnv())
    assert list(rollouts) == ["X"]
    assert rollouts["X"].total_reward == 1.75


async def test_a_function_is_a_bot_and_may_be_async() -> None:
    async def lowest_free(obs: str) -> str:
        return obs.rpartition("Free: ")[2].split()[-1]

    env = TwoPlayerTicTacToeEnv()
    players = {"X": scripted_agent([move("A1"), move("B1"), move("C1")]), "O": lowest_free}
    rollouts = await play(players, env)
    assert env.board == "XXX....OO"
    assert rollouts["X"].terminated


@pytest.mark.parametrize("action", [None, 5, b"1"])
async def test_a_bot_whose_action_is_no_text_is_named(action: Any) -> None:
    rollouts = await play(
        {"left": scripted_agent([move("1")]), "right": lambda obs: action}, Duel()
    )
    assert (
        rollouts["left"].error
        == f"AgentError: the bot of 'right' gave {action!r}: an action is text"
    )
    assert len(rollouts["left"].agent_steps) == 1, "what the other said is kept"


async def test_a_random_bot_meets_a_group_with_the_same_moves() -> None:
    async def moves(env_seed: int, sampling_seed: int) -> list[dict[str, str]]:
        env = Duel(6)
        players: dict[str, Any] = {
            "left": scripted_agent([move("5")] * 6),
            "right": RandomBot("0123456789"),
        }
        spec = RunSpec("e", env_seed=env_seed, sampling_seed=sampling_seed)
        await MultiAgentProtocol(players).run(env, spec)
        return env.played

    assert await moves(1, 1) == await moves(1, 2)
    assert await moves(1, 1) != await moves(2, 1)


async def test_seats_of_other_models_are_left_out_on_request() -> None:
    rollouts = await play(both([move("1")], [move("2")]), Duel(), uncollected=["right"])
    assert list(rollouts) == ["left"]
    assert rollouts["left"].env_steps[-1].reward_components["env"] == -1.0


async def test_simultaneous_movers_act_at_the_same_time_and_in_one_step() -> None:
    together = asyncio.Barrier(2)

    async def say(call: Any) -> str:
        async with asyncio.timeout(10):
            await together.wait()
        return move("1")

    env = Duel()
    rollouts = await play({"left": scripted_agent(say), "right": scripted_agent(say)}, env)
    assert env.played == [{"left": "1", "right": "1"}]
    assert all(r.terminated for r in rollouts.values())


async def test_a_failed_parse_among_simultaneous_movers_is_asked_again_before_the_step() -> None:
    env = Duel()
    rollouts = await play(both([move("1")], [NOTHING, NOTHING, move("2")]), env)
    assert env.played == [{"left": "1", "right": "2"}]
    assert len(rollouts["left"].agent_steps) == 1, "the action that parsed waits"
    assert [s.stepped for s in rollouts["right"].env_steps] == [False, False, True]
    assert rollouts["left"].env_steps[-1].reward_components["env"] == -1.0


async def test_a_mover_that_never_parses_cuts_the_episode_after_a_bounded_number_of_tries() -> None:
    env = Duel()
    rollouts = await play(both([move("1")], [NOTHING] * 9), env, max_parse_retries=2)
    assert env.played == []
    assert len(rollouts["right"].agent_steps) == 3
    for rollout in rollouts.values():
        assert rollout.truncation_reason is TruncationReason.BUDGET
        assert rollout.error is None
    waited = rollouts["left"].env_steps[-1]
    assert (waited.action, waited.stepped, waited.reward) == ("1", False, 0.25)


async def test_where_partial_actions_are_accepted_the_step_goes_on_without_who_failed() -> None:
    env = PartialDuel()
    rollouts = await play(both([move("1")], [NOTHING]), env)
    assert env.played == [{"left": "1"}]
    failed, heard = rollouts["right"].env_steps
    assert failed.info["parse_error"] is True
    assert heard.agent_steps == ()
    assert heard.turn_index == failed.turn_index == 0
    assert heard.reward == -1.0
    assert heard.terminated


async def test_a_step_needs_at_least_one_action() -> None:
    env = PartialDuel()
    rollouts = await play(both([NOTHING, move("1")], [NOTHING, move("2")]), env)
    assert env.played == [{"left": "1", "right": "2"}]
    assert all(len(r.env_steps) == 2 for r in rollouts.values())


async def test_the_limit_of_steps_truncates_everybody() -> None:
    rollouts = await play(both([move("1")] * 3, [move("2")] * 3), Duel(9), spec={"max_steps": 3})
    for rollout in rollouts.values():
        assert len(rollout.env_steps) == 3
        assert rollout.truncation_reason is TruncationReason.MAX_STEPS


async def test_a_full_context_of_one_ends_the_episode_for_all() -> None:
    players = {
        "left": scripted_agent([move("1")] * 30, client={"max_context_tokens": 200}),
        "right": scripted_agent([move("2")] * 30),
    }
    rollouts = await play(players, Duel(30))
    for rollout in rollouts.values():
        assert rollout.truncation_reason is TruncationReason.CONTEXT_WINDOW
        assert rollout.error is None
    assert rollouts["left"].env_steps[-1].stepped
    assert not rollouts["right"].env_steps[-1].stepped, "its last action was never used"


async def test_a_request_that_fails_ends_the_episode_for_all_and_keeps_what_was_sampled() -> None:
    players = {
        "left": scripted_agent([move("1")] * 3),
        "right": scripted_agent(
            [move("2")] * 3,
            client={
                "latency_s": 0.02,
                "fault": lambda call: ConnectionError("gone") if call.index else None,
            },
        ),
    }
    rollouts = await play(players, Duel(3))
    for rollout in rollouts.values():
        assert rollout.error == "ConnectionError: gone"
        assert rollout.truncation_reason is TruncationReason.ERROR
    assert len(rollouts["left"].agent_steps) == 2
    assert rollouts["left"].env_steps[-1].action == "1"


async def test_an_agent_that_ended_and_is_asked_to_act_again_costs_the_episode() -> None:
    players = {"agent": scripted_agent([move("a")] * 3), "other": scripted_agent([""])}
    rollouts = await play(players, Endless())
    for rollout in rollouts.values():
        assert rollout.error is not None
        assert "active_agents names agent 'agent', which has ended" in rollout.error
    assert rollouts["agent"].terminated, "its own ending stays what it was"
    assert rollouts["other"].steps == ()


async def test_seats_that_do_not_fit_the_environment_are_refused() -> None:
    with pytest.raises(ProtocolError, match="no player for \\['right'\\]"):
        await play({"left": scripted_agent([""])}, Duel())
    with pytest.raises(ProtocolError, match="no such agent as \\['ghost'\\]"):
        await play({**both([""], [""]), "ghost": scripted_agent([""])}, Duel())
    with pytest.raises(ProtocolError, match="cannot play 'left'"):
        await play({"left": 3, "right": scripted_agent([""])}, Duel())
    agent = scripted_agent([""])
    with pytest.raises(ProtocolError, match="one agent object sits on two seats"):
        await play({"left": agent, "right": agent}, Duel())
    with pytest.raises(ConfigError, match="max_parse_retries"):
        MultiAgentProtocol({}, max_parse_retries=-1)


async def test_seats_that_are_not_named_are_filled_by_the_default() -> None:
    rollouts = await play(
        {"left": lambda obs: "1"}, Duel(), default=lambda agent_id: scripted_agent([move("2")])
    )
    assert list(rollouts) == ["right"]
    assert rollouts["right"].env_steps[-1].reward_components["env"] == 1.0
