from __future__ import annotations

import asyncio
import random
import re
import sys
from typing import Any

import numpy as np
import pytest

from ludic.envs import build_env
from ludic.envs.adapters.textarena import TextArenaEnv
from ludic.errors import ConfigError, EnvError, UnknownNameError
from ludic.types import EnvSpec
from tests.envs.adapters.playing import alone, play

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore::SyntaxWarning")]

GUESS = "GuessTheNumber-v0"
WIN_TIC_TAC_TOE = ["[0]", "[3]", "[1]", "[4]", "[2]"]


class Bisection:
    """Finds the number between 1 and 20."""

    def __init__(self) -> None:
        self.low, self.high, self.last = 1, 20, 0

    def __call__(self, heard: str) -> str:
        if "higher" in heard.lower() and self.last:
            self.low = self.last + 1
        elif "lower" in heard.lower() and self.last:
            self.high = self.last - 1
        self.last = (self.low + self.high) // 2
        return f"[{self.last}]"


async def test_a_found_number_is_worth_what_the_game_says() -> None:
    outcomes = await alone(TextArenaEnv(GUESS), Bisection(), seed=3)
    assert [o.reward for o in outcomes[:-1]] == [0.0] * (len(outcomes) - 1)
    assert outcomes[-1].reward == 1.0
    assert outcomes[-1].terminated
    assert outcomes[-1].info["invalid_move"] is False
    assert outcomes[-1].obs == outcomes[-1].info["reason"]


async def test_the_rewards_are_those_of_the_package_itself() -> None:
    import textarena

    said = [f"[{guess}]" for guess in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)]
    state = random.getstate()
    bare = textarena.make(GUESS)
    bare.reset(num_players=1, seed=11)
    done, moves = False, 0
    while not done:
        bare.get_observation()
        done, _ = bare.step(said[moves])
        moves += 1
    random.setstate(state)
    outcomes = await alone(TextArenaEnv(GUESS), said, seed=11)
    assert len(outcomes) == moves + 1
    rewards, facts = bare.close()
    assert outcomes[-1].reward == float(rewards[0])
    assert outcomes[-1].info["reason"] == facts[0]["reason"]


async def test_the_end_of_the_turns_is_an_ending_that_the_game_scores() -> None:
    env = TextArenaEnv(GUESS, make={"max_turns": 2})
    outcomes = await alone(env, ["[1]", "[2]", "[3]", "[4]"], seed=3)
    assert len(outcomes) == 4
    assert outcomes[-1].terminated
    assert 0 <= outcomes[-1].reward < 1
    assert "limit" in outcomes[-1].obs.lower()


async def test_the_first_invalid_move_keeps_the_turn_and_the_second_loses() -> None:
    outcomes = await alone(TextArenaEnv(GUESS), ["[99]", "[99]"], seed=3)
    assert "invalid move" in outcomes[1].obs
    assert not outcomes[1].terminated
    assert outcomes[2].terminated
    assert outcomes[2].info["invalid_move"] is True


async def test_both_players_hear_who_won() -> None:
    outcomes = await play(TextArenaEnv("TicTacToe-v0"), WIN_TIC_TAC_TOE)
    assert list(outcomes[0]) == ["player_0"]
    assert outcomes[1]["player_0"].obs == ""
    assert "You are Player 1" in outcomes[1]["player_1"].obs
    assert {a: (o.reward, o.terminated) for a, o in outcomes[-1].items()} == {
        "player_0": (1.0, True),
        "player_1": (-1.0, True),
    }


async def test_a_player_that_moves_wrongly_twice_loses_to_the_other() -> None:
    outcomes = await play(TextArenaEnv("TicTacToe-v0"), ["[4]", "[4]", "[4]"])
    assert {a: o.reward for a, o in outcomes[-1].items()} == {"player_0": 1.0, "player_1": -1.0}


async def test_the_number_of_players_is_the_smallest_unless_given() -> None:
    assert TextArenaEnv(GUESS).agent_ids == ("player_0",)
    assert len(TextArenaEnv("LiarsDice-v0").agent_ids) == 2
    three = TextArenaEnv("LiarsDice-v0", players=3)
    assert len(three.agent_ids) == 3
    await play(three, [])
    with pytest.raises(ConfigError, match="is not for 5 players"):
        await play(TextArenaEnv("TicTacToe-v0", players=5), [])


async def test_only_what_is_new_is_shown_unless_all_is_asked_for() -> None:
    new = await alone(TextArenaEnv(GUESS), ["[1]", "[2]"], seed=3)
    whole = await alone(TextArenaEnv(GUESS, observation="all"), ["[1]", "[2]"], seed=3)
    assert whole[2].obs == "\n".join(o.obs for o in new)
    raw = await alone(TextArenaEnv(f"{GUESS}-raw"), ["[1]", "[2]"], seed=3)
    assert raw[2].obs.replace("[Player 0]", "[Player]") == new[2].obs


def numpy_state() -> str:
    return str(np.random.get_state())


DICE = "PigDice-v0"  # rolls while it is played


async def dice(seed: int) -> list[str]:
    outcomes = await play(TextArenaEnv(DICE), ["[roll]"] * 12, seed=seed)
    return [str(o) for o in outcomes]


async def test_the_same_seed_is_the_same_episode_whatever_else_is_going_on() -> None:
    alone_before = await dice(5)
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), numpy_state()
    several = await asyncio.gather(*(dice(seed) for seed in (5, 6, 5, 7, 5)))
    assert several[0] == several[2] == several[4] == alone_before
    assert len({str(one) for one in several}) == 3
    # Nor did the games touch the generators that everything else uses.
    assert random.getstate() == before[0]
    assert numpy_state() == before[1]


async def test_threads_of_others_that_draw_and_seed_do_not_disturb_a_game() -> None:
    alone_before = await dice(5)
    stop = asyncio.Event()

    def disturb() -> None:
        while not stop.is_set():
            random.seed(0)
            random.random()

    noise = asyncio.get_running_loop().run_in_executor(None, disturb)
    try:
        assert [await dice(5) for _ in range(3)] == [alone_before] * 3
    finally:
        stop.set()
        await noise


async def test_the_package_used_directly_still_draws_from_the_global_generator() -> None:
    import textarena

    TextArenaEnv(DICE)

    def rolls() -> list[Any]:
        game = textarena.make(DICE)
        game.reset(num_players=2, seed=4)
        found = []
        for _ in range(6):
            found.append(game.get_observation())
            game.step("[roll]")
        return found

    assert rolls() == rolls()
    random.seed(4)
    first = random.random()
    textarena.make(DICE).reset(num_players=2, seed=4)
    assert random.random() == first


async def test_a_game_by_name_in_a_process_of_its_own() -> None:
    env = build_env(EnvSpec("textarena", {"id": GUESS}), isolation="process")
    assert (await alone(env, Bisection(), seed=3))[-1].reward == 1.0


async def test_a_game_that_breaks_is_an_error_of_that_episode() -> None:
    # The package gives the reason where it should give the reward.
    with pytest.raises(EnvError, match="as the reward of player_0"):
        await alone(TextArenaEnv("Countdown-v0"), ["nothing", "nothing"])


def test_what_cannot_be_played_is_refused_in_a_sentence() -> None:
    with pytest.raises(UnknownNameError, match="GuessTheNumber-v0"):
        TextArenaEnv("GuesTheNumber-v0")
    with pytest.raises(ConfigError, match="cannot make"):
        TextArenaEnv(GUESS, make={"no_such_argument": 1})
    with pytest.raises(ConfigError, match="must be 'new' or 'all'"):
        TextArenaEnv(GUESS, observation="some")  # type: ignore[arg-type]


def test_data_that_is_not_there_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nltk = pytest.importorskip("nltk")

    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: False)
    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(ConfigError, match=re.escape("fetch it with nltk.download('words')")):
        TextArenaEnv("Hangman-v0")


def test_a_file_that_the_package_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot make 'UsedCarNegotiation-v0': .*blue_book"):
        TextArenaEnv("UsedCarNegotiation-v0")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="it is Python 3.12's syntax")
def test_a_game_that_wants_a_newer_python_says_so() -> None:
    with pytest.raises(ConfigError, match="a newer one may take it"):
        TextArenaEnv("Chess-v0")
