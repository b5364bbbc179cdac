from __future__ import annotations

import asyncio
import string
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ludic.envs import SingleAgentEnv, TicTacToeEnv, build_env
from ludic.envs.adapters.gymnasium import GymnasiumEnv
from ludic.errors import ConfigError, EnvError
from ludic.plumbing.lazy import stored_names
from ludic.types import EnvSpec, Info, StepOutcome
from tests.envs.adapters.playing import alone

pytestmark = pytest.mark.adapters

LAKE = {"id": "FrozenLake-v1", "make": {"is_slippery": False}}
WAY = ["down", "down", "right", "right", "down", "right"]


def lake(**changes: Any) -> GymnasiumEnv:
    return GymnasiumEnv(**{**LAKE, **changes})


def shown_row(obs: Any, info: Any) -> str:
    return f"row {int(obs) // 4}"


@pytest.fixture
def odd_spaces() -> Iterator[None]:
    """Environments with the other spaces of actions, registered as their authors would."""
    import gymnasium

    class Echo(gymnasium.Env):  # type: ignore[misc]
        observation_space = gymnasium.spaces.Text(100, charset=string.printable)

        def __init__(self, space: str) -> None:
            self.action_space = {
                "text": gymnasium.spaces.Text(5, min_length=2),
                "multi": gymnasium.spaces.MultiDiscrete([2, 3]),
                "from_one": gymnasium.spaces.Discrete(2, start=1),
                "box": gymnasium.spaces.Box(0, 1),
            }[space]

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return "Say it.", {}

        def step(self, action: Any) -> Any:
            if str(action) == "crash":
                raise RuntimeError("it crashed")
            return str(action), np.float64(0.5), np.bool_(True), True, {"got": np.asarray(action)}

    gymnasium.register("LudicEcho-v0", entry_point=Echo)
    yield
    del gymnasium.registry["LudicEcho-v0"]


async def test_the_goal_gives_the_reward_of_gymnasium_and_the_player_can_be_seen() -> None:
    outcomes = await alone(lake(), WAY)
    assert [o.reward for o in outcomes] == [0, 0, 0, 0, 0, 0, 1.0]
    assert outcomes[-1].terminated
    assert not outcomes[-1].truncated
    assert outcomes[0].obs == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert outcomes[1].obs == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"


async def test_a_hole_ends_the_episode_without_a_reward() -> None:
    outcomes = await alone(lake(), ["Right", " DOWN "])
    assert outcomes[-1] == StepOutcome(outcomes[-1].obs, 0.0, terminated=True, info={"prob": 1.0})


async def test_a_time_limit_is_a_truncation() -> None:
    outcomes = await alone(lake(make={"is_slippery": False, "max_episode_steps": 3}), ["up"] * 9)
    assert len(outcomes) == 4
    assert outcomes[-1].truncated
    assert not outcomes[-1].terminated


async def test_a_word_that_is_no_action_is_no_move() -> None:
    outcomes = await alone(lake(illegal_reward=-0.25), ["fly", *WAY])
    assert outcomes[1].reward == -0.25
    assert outcomes[1].info == {"illegal": True}
    assert outcomes[1].obs.startswith("'fly' is not an action. Actions: left, down, right, up\n")
    assert outcomes[-1].reward == 1.0
    assert len(outcomes) == 8


async def test_the_rewards_are_those_of_the_package_itself() -> None:
    import gymnasium

    bare = gymnasium.make("Taxi-v4")
    bare.reset(seed=5)
    words = ("south", "north", "east", "west", "pickup", "dropoff")
    moves = [0, 4, 2, 5, 1, 3]
    rewards = [float(bare.step(move)[1]) for move in moves]
    assert len(set(rewards)) > 1
    outcomes = await alone(GymnasiumEnv("Taxi-v4"), [words[move] for move in moves], seed=5)
    assert [o.reward for o in outcomes[1:]] == rewards


async def test_the_same_seed_is_the_same_episode_also_beside_another() -> None:
    make = {"is_slippery": True}
    first = await alone(lake(make=make), WAY, seed=7)
    again, other = await asyncio.gather(
        alone(lake(make=make), WAY, seed=7), alone(lake(make=make), WAY, seed=8)
    )
    assert again == first
    assert other != first


async def test_an_environment_by_name_in_a_process_of_its_own() -> None:
    env = build_env(EnvSpec("gymnasium", LAKE), isolation="process")
    assert (await alone(env, WAY))[-1].reward == 1.0


async def test_only_allowed_actions_are_shown_where_gymnasium_says_which() -> None:
    (opening,) = await alone(GymnasiumEnv("Taxi-v4", show_actions=True), [], seed=1)
    assert opening.obs.endswith("\nActions: south, north, east, west")
    assert "[ ]" in opening.obs
    assert "B(blue)" in opening.obs


async def test_observations_may_be_text_or_come_from_a_function() -> None:
    (plainly,) = await alone(GymnasiumEnv("Blackjack-v1"), [], seed=1)
    assert plainly.obs == "[20, 7, 0]"
    row = f"{__name__}:shown_row"
    assert (await alone(lake(observation=row), ["down"]))[1].obs == "row 1"
    assert (await alone(lake(observation=shown_row), ["down"]))[1].obs == "row 1"
    assert (await alone(lake(colours="drop"), []))[0].obs == "SFFF\nFHFH\nFFFH\nHFFG"


@pytest.mark.parametrize(
    ("space", "actions", "said", "got"),
    [
        ("text", None, "abc", "abc"),
        ("multi", None, "1, 2", [1, 2]),
        ("multi", [["up", "down"], ["a", "b", "c"]], "down c", [1, 2]),
        ("from_one", None, "2", 2),
        ("from_one", ["no", "yes"], "Yes", 2),
    ],
)
async def test_other_spaces_are_played_by_words(
    odd_spaces: None, space: str, actions: Any, said: str, got: Any
) -> None:
    env = GymnasiumEnv("LudicEcho-v0", make={"space": space}, actions=actions)
    outcomes = await alone(env, ["!", said])
    assert outcomes[1].info == {"illegal": True}
    assert outcomes[2].info == {"got": got}
    assert outcomes[2].reward == 0.5
    # Gymnasium may say both: what is over was not cut.
    assert outcomes[2].terminated
    assert not outcomes[2].truncated


async def test_an_environment_that_raises_is_an_error_of_that_environment(odd_spaces: None) -> None:
    with pytest.raises(EnvError, match="raised RuntimeError in step 1: it crashed"):
        await alone(GymnasiumEnv("LudicEcho-v0", make={"space": "text"}), ["crash"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"id": "FrozenLake-v99"}, "Gymnasium cannot make 'FrozenLake-v99'"),
        ({**LAKE, "make": {"slippy": 1}}, "Gymnasium cannot make 'FrozenLake-v1'"),
        ({**LAKE, "actions": ["a", "b"]}, "wants 4 different words"),
        ({"id": "Blackjack-v1", "observation": "ansi"}, "does not render as text"),
        ({**LAKE, "observation": "nowhere:to_be_found"}, "neither 'ansi' nor 'text'"),
        ({**LAKE, "colours": "red"}, "must be 'mark' or 'drop'"),
        ({"id": "LudicEcho-v0", "make": {"space": "box"}}, "for which there are no words"),
    ],
)
def test_what_cannot_be_played_is_refused_in_a_sentence(
    odd_spaces: None, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        GymnasiumEnv(**arguments)


def test_stored_data_gets_no_module_imported() -> None:
    with stored_names():
        with pytest.raises(ConfigError, match="named by stored data"):
            GymnasiumEnv("antigravity:Fly-v0")
        with pytest.raises(ConfigError, match="named by stored data"):
            lake(observation="antigravity:fly")
        lake()


class Slow(SingleAgentEnv):
    """An environment with async methods."""

    async def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        await asyncio.sleep(0)
        return f"{seed}", {}

    async def env_step(self, action: str) -> StepOutcome:
        await asyncio.sleep(0)
        return StepOutcome(action, 1.0, truncated=True, reward_components={"all": 1.0})

    def env_current_obs(self) -> str:
        return "here"


@pytest.mark.parametrize("actions", [None, ["A1", "B2", "C3"]])
@pytest.mark.filterwarnings("error")
def test_a_ludic_environment_passes_gymnasiums_own_checks(actions: list[str] | None) -> None:
    import gymnasium
    from gymnasium.utils.env_checker import check_env

    from ludic.envs.adapters.as_gymnasium import as_gymnasium

    def make(**options: Any) -> Any:
        return as_gymnasium(TicTacToeEnv(opponent="random"), actions=actions, **options)

    gymnasium.register("LudicTicTacToe-v0", entry_point=make, disable_env_checker=True)
    try:
        check_env(gymnasium.make("LudicTicTacToe-v0").unwrapped)
        seen = gymnasium.make("LudicTicTacToe-v0", render_mode="ansi")
        seen.reset(seed=0)
        assert "A B C" in seen.render()
    finally:
        del gymnasium.registry["LudicTicTacToe-v0"]


def test_a_game_through_gymnasium_is_the_game_of_the_environment() -> None:
    from gymnasium.error import ResetNeeded

    from ludic.envs.adapters.as_gymnasium import as_gymnasium

    env = as_gymnasium(TicTacToeEnv(opponent="perfect", illegal_reward=-2.0))
    with pytest.raises(ResetNeeded):
        env.step("A1")
    obs, _ = env.reset(seed=3)
    assert env.observation_space.contains(obs)
    obs, reward, terminated, truncated, info = env.step("Z9")
    assert (reward, terminated, truncated) == (-2.0, True, False)
    assert info["result"] == "illegal"
    first = env.reset()[0], env.reset()[0]
    env.reset(seed=3)
    assert (env.reset()[0], env.reset()[0]) == first


def test_an_async_environment_and_its_reward_components_through_gymnasium() -> None:
    from ludic.envs.adapters.as_gymnasium import as_gymnasium

    env = as_gymnasium(Slow())
    assert env.reset(seed=4) == ("4", {})
    assert env.step("x") == ("x", 1.0, False, True, {"reward_components": {"all": 1.0}})


def test_several_agents_cannot_be_played_through_gymnasium() -> None:
    from ludic.envs import TwoPlayerTicTacToeEnv
    from ludic.envs.adapters.as_gymnasium import as_gymnasium

    with pytest.raises(ConfigError, match="Gymnasium's interface is for one"):
        as_gymnasium(TwoPlayerTicTacToeEnv()).reset(seed=0)
