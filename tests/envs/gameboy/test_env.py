"""The game of `rom.py`, played through the emulator: observations, buttons, rewards, endings."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import signal
import struct
import time
from pathlib import Path
from random import Random
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from ludic.envs import ProcessEnv, build_env
from ludic.envs.gameboy import GameBoyEnv
from ludic.envs.gameboy.emulator import BUTTONS, Emulator
from ludic.errors import ConfigError, EnvError
from ludic.inference.scripted_client import ScriptedCall
from ludic.rollouts import ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.runs.playing import play_by_hand
from ludic.types import EnvSpec, StepOutcome
from tests.envs.adapters.playing import alone
from tests.envs.gameboy.rom import HELD, rom, write_game
from tests.rollouts.worlds import runtime

pytestmark = [pytest.mark.adapters("pyboy"), pytest.mark.integration]

HALL = """Hall, x 1, y 1. Columns 0 to 6:
0 #######
1 #@....#
2 #.##..#
3 #.#...#
4 #......
5 #######
Name: ANN
Party: Mouse, level 5, HP 300
Bag: empty
Badges: none
Money: 195"""


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_game(tmp_path_factory.mktemp("walker"))


def spec(game: dict[str, Any], /, **options: Any) -> EnvSpec:
    return EnvSpec("gameboy", {**game, **options})


def played(env: GameBoyEnv, *actions: str) -> list[StepOutcome]:
    return [env.env_step(action) for action in actions]


def lines(outcome: StepOutcome, *starts: str) -> list[str]:
    return [line for line in outcome.obs.split("\n") if line.startswith(starts)]


async def test_a_whole_episode_in_a_process_of_its_own(game: dict[str, Any]) -> None:
    env = build_env(spec(game))
    assert isinstance(env, ProcessEnv)
    opening, right, wall, talk, close, coin, both, door, goal = await alone(
        env,
        ["right, right right right", "right", "right a", "b", "walk to 3 3", "start select",
         "walk to 6 4", "walk to 4 3"],
    )  # fmt: skip
    assert opening.obs == HALL
    assert lines(right, "Hall", "1") == ["Hall, x 5, y 1. Columns 1 to 10:", "1 ....@#####"]
    assert right.reward == 0
    assert right.info == {"steps": 1, "frames": 32}
    assert wall.obs == right.obs
    assert talk.reward_components == {"sign": 0.25}
    assert talk.obs.startswith("Walker\nOn the screen:\n  HELLO ANN\nName: ANN\n")
    assert talk.obs.endswith("Press A to close the dialogue: 1")
    assert close.obs == right.obs
    assert lines(coin, "Hall", "Money") == ["Hall, x 3, y 3. Columns 0 to 8:", "Money: 205"]
    assert coin.reward_components == {"riches": pytest.approx(0.1)}
    assert both.reward_components == {"levels": 0.125}
    assert lines(both, "Party", "Bag") == ["Party: Mouse, level 6, HP 300", "Bag: Rope x1"]
    assert door.reward_components == {"places": 0.5}
    assert door.obs.startswith("Something happened on the way.\nGarden, x 1, y 1.")
    assert (goal.reward, goal.terminated, goal.truncated) == (2.0, True, False)
    assert goal.info["result"] == "reached"
    assert lines(goal, "Badges") == ["Badges: Star"]


@pytest.mark.parametrize(
    ("button", "changed"),
    [
        ("up", "Hall, x 1, y 1. Columns 0 to 6:"),  # a wall
        ("down", "Hall, x 1, y 2. Columns 0 to 6:"),
        ("left", "Hall, x 1, y 1. Columns 0 to 6:"),  # a wall
        ("right", "Hall, x 2, y 1. Columns 0 to 7:"),
        ("a", "Hall, x 1, y 1. Columns 0 to 6:"),  # no sign there
        ("b", "Hall, x 1, y 1. Columns 0 to 6:"),
        ("start", "Party: Mouse, level 6, HP 300"),
        ("select", "Bag: Rope x1"),
        ("wait 5", "Hall, x 1, y 1. Columns 0 to 6:"),
    ],
)
def test_every_button_does_what_the_game_does_with_it(
    game: dict[str, Any], button: str, changed: str
) -> None:
    env = GameBoyEnv(**game)
    env.env_reset(seed=0)
    assert changed in env.env_step(button).obs.split("\n")
    env.close()


def test_a_walk_says_why_it_ends_and_other_words_are_no_move(game: dict[str, Any]) -> None:
    env = GameBoyEnv(**game, max_buttons=2)
    env.env_reset(seed=0)
    nowhere, jump, many, talk = played(env, "walk to 0 0", "jump", "a a a", "walk to 5 1")
    assert nowhere.obs.startswith("No way to 0 0 is known.\nHall, x 1, y 1.")
    for illegal in (jump, many):
        assert illegal.info == {"steps": illegal.info["steps"], "frames": 0, "illegal": True}
        assert "is not an action. Answer with one button or up to 2: up, down" in illegal.obs
    assert lines(talk, "Hall") == ["Hall, x 5, y 1. Columns 1 to 10:"]
    played(env, "right a")
    assert env.env_step("walk to 1 1").obs.startswith("You cannot walk now.\nWalker\n")
    env.close()


def test_a_walk_goes_around_what_only_looks_like_ground(game: dict[str, Any]) -> None:
    env = GameBoyEnv(**game)
    env.env_reset(seed=0)
    env.env_step("walk to 6 4")
    assert env.env_step("walk to 2 1").obs.startswith("No way to 2 1 is known.\nGarden, x 1, y 1.")
    around = env.env_step("walk to 3 1")  # over the goal
    assert lines(around, "Garden") == ["Garden, x 4, y 3. Columns 0 to 9:"]
    assert around.terminated
    env.close()


def test_a_walk_ends_where_a_door_leads_elsewhere_on_the_same_map(
    game: dict[str, Any], tmp_path: Path
) -> None:
    described = Path(game["game"]).read_text(encoding="utf-8")
    one_place = tmp_path / "one_place.toml"
    one_place.write_text(
        described.replace("place = { address = 0xC0A0", "place = { address = 0xC0A8")
    )
    env = GameBoyEnv(game["rom"], game=str(one_place))
    env.env_reset(seed=0)
    outcome = env.env_step("walk to 6 4")
    assert outcome.obs.startswith("Something happened on the way.\nHall, x 1, y 1.")
    env.close()


def test_a_limit_cuts_and_a_goal_ends(game: dict[str, Any]) -> None:
    env = GameBoyEnv(**game, max_steps=2, goal="levels")
    env.reset(seed=0)
    first, second = played(env, "b", "b")
    assert (first.truncated, second.truncated, second.info["result"]) == (False, True, "cut")
    env.reset(seed=0)
    ended = env.env_step("start start start")
    assert (ended.terminated, ended.reward) == (True, 0.125)
    env.close()


def test_a_thousand_steps_twice_are_the_same_trace(game: dict[str, Any]) -> None:
    def trace() -> tuple[list[Any], str]:
        env, random, seed = GameBoyEnv(**game, jitter=7), Random(1), 0
        seen: list[Any] = []
        seen.append(env.env_reset(seed=seed))
        words = [*BUTTONS, "wait 3", "walk to 6 4", "walk to 3 3", "walk to 4 3", "nonsense"]
        for _ in range(1000):
            outcome = env.env_step(" ".join(random.choices(words, k=1)))
            seen.append(outcome)
            if outcome.terminated:
                seed += 1
                seen.append(env.env_reset(seed=seed))
        bits = hashlib.sha256(env.snapshot()).hexdigest()
        env.close()
        assert seed > 2
        return seen, bits

    assert trace() == trace()


def test_a_group_of_eight_starts_on_the_same_bits(game: dict[str, Any], tmp_path: Path) -> None:
    maker = GameBoyEnv(**game)
    maker.env_reset(seed=0)
    states = []
    for name, way in {"corner": "walk to 1 4", "garden": "walk to 6 4"}.items():
        maker.env_step(way)
        states.append(str(tmp_path / f"{name}.state"))
        Path(states[-1]).write_bytes(maker.snapshot())
    maker.close()

    group = [GameBoyEnv(**game, states=states, jitter=30) for _ in range(8)]
    starts: dict[str, set[str]] = {}
    for seed in range(6):
        openings = {env.env_reset(seed=seed)[0] for env in group}
        bits = {hashlib.sha256(env.snapshot()).hexdigest() for env in group}
        assert len(openings) == len(bits) == 1
        starts.setdefault(str(group[0].task_key()), set()).update(bits)
        for i, env in enumerate(group):  # what was played before leaves nothing behind
            played(env, *["right", "down", "start"] * i)
    assert starts.keys() == {"corner", "garden"}
    assert sum(map(len, starts.values())) > 2  # the frames before the start differ, too
    env = GameBoyEnv(**game, states=states[1:])
    assert env.env_reset(seed=0)[0].startswith("Garden, x 1, y 1.")
    assert env.env_step("down").reward == 0  # the garden is where it began
    env.close()
    for env in group:
        env.close()


async def test_a_killed_instance_costs_its_own_episode(game: dict[str, Any]) -> None:
    victims: list[int] = []
    before = set(psutil.Process().children())  # that other tests have left for the next ones

    async def policy(call: ScriptedCall) -> str:
        if call.index == 1 and not victims:
            children = [
                child
                for child in set(psutil.Process().children()) - before
                if "ludic.workers.child_process" in child.cmdline()
            ]
            assert len(children) >= 8
            victims.append(children[0].pid)
            os.kill(victims[0], signal.SIGKILL)
        await asyncio.sleep(0)
        return ["walk to 6 4", "wait 60", "walk to 4 3"][min(call.index, 2)]

    protocol = ProtocolSpec("single_agent", {"parser": "text"})
    request = RolloutRequest(spec(game), protocol, num_episodes=8, env_seed=1)
    engine = RolloutEngine(runtime=runtime(policy), lost_member="keep_partial")
    rollouts = await engine.generate_rollouts([request], 5, 8)
    failed = [rollout for rollout in rollouts if rollout.error]
    assert len(rollouts) == 8
    assert len(victims) == len(failed) == 1
    assert "environment gameboy (in its own process)" in str(failed[0].error)
    assert [r.total_reward for r in rollouts if not r.error] == [2.5] * 7


def test_a_person_sees_the_screen_beside_the_state(game: dict[str, Any]) -> None:
    out = io.StringIO()
    typed = io.StringIO("walk to 0 0\nwalk to 6 4\nwalk to 4 3\n")
    assert play_by_hand(build_env(spec(game)), seed=0, stdin=typed, stdout=out) == 0
    shown = out.getvalue().split("\n")
    pictures = [i for i, line in enumerate(shown) if line[81:].startswith(("Hall,", "Garden,"))]
    assert len(pictures) == 4
    first = shown[pictures[0] : pictures[0] + 36]
    assert all(len(line[:80]) == 80 and set(line[:80]) <= set(" ░▒▓█") for line in first)
    # A cell of the ground is eight blocks wide and four rows high: the wall above the player.
    assert first[12][24:48] == "█" * 24
    assert first[16][24:32] == "█" * 8
    assert "█" not in first[16][40:48]
    assert [line[81:] for line in first[:12]] == HALL.split("\n")
    assert any(line[81:] == "No way to 0 0 is known." for line in shown)
    assert "total reward 2.5" in shown[-2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rom": "nowhere.gb"}, "rom='nowhere.gb' cannot be read: No such file"),
        ({"game": "red"}, "is not Pokémon Red: its SHA-1 is"),
        ({"game": None}, "no description has its SHA-1"),
        ({"goal": "moon"}, "goal='moon' is not a milestone of Walker: places, sign"),
        ({"states": ["gone.state"]}, "states='gone.state' cannot be read"),
        ({"max_steps": 0}, "must be at least 1"),
    ],
)
def test_what_cannot_be_played_is_refused_in_a_sentence(
    game: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        GameBoyEnv(**{**game, **options})
    env = build_env(spec(game, **options))
    with pytest.raises(EnvError, match=said):  # as soon as the run is checked
        env.check_machine()
    env.close()


def test_a_broken_state_and_a_broken_rom_are_errors(game: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "broken.state").write_bytes(b"\xff" * 10)
    env = GameBoyEnv(**game, states=[str(tmp_path / "broken.state")])
    with pytest.raises(EnvError, match="PyBoy cannot load this state"):
        env.env_reset(seed=0)
    env.close()


def test_the_actions_are_offered_as_tools(game: dict[str, Any]) -> None:
    env = GameBoyEnv(**game, tools=True)
    _, info = env.env_reset(seed=0)
    assert [tool["function"]["name"] for tool in info["tools"]] == ["press", "walk_to"]
    call = '{"name": "walk_to", "arguments": {"x": 3, "y": 3}}'
    assert lines(env.env_step(call), "Hall") == ["Hall, x 3, y 3. Columns 0 to 8:"]
    prompt = env.suggested_sysprompt("agent")
    assert prompt is not None
    assert prompt.startswith("You play Walker. On the map, @ is you, . can be walked on, # cannot.")
    env.close()


def test_a_state_begins_with_no_button_held() -> None:
    emulator = Emulator(rom())
    emulator.run(120)
    emulator._pyboy.button_press("start")
    emulator.run(4)
    assert list(emulator.read(HELD, 1)) != [0]
    emulator.restore(emulator.snapshot())
    emulator.run(4)
    assert list(emulator.read(HELD, 1)) == [0]
    emulator.close()


def test_the_clock_of_a_cartridge_does_not_follow_the_time_of_day() -> None:
    cartridge = bytearray(rom())
    cartridge[0x147] = 0x10
    cartridge[0x14D] = -sum(cartridge[0x134:0x14D]) - 0x19 & 0xFF
    emulator = Emulator(bytes(cartridge))
    before = time.time()
    state = bytearray(emulator.snapshot())
    dated = [
        at
        for at in range(len(state) - 7)
        if before <= struct.unpack_from("d", state, at)[0] <= time.time()
    ]
    assert dated
    for at in dated:
        struct.pack_into("d", state, at, before - 5 * 3600)  # it was saved five hours ago
    emulator.restore(bytes(state))
    memory = emulator._pyboy.memory
    for address, value in ((0, 0x0A), (0x4000, 0x0A), (0x6000, 0), (0x6000, 1)):
        memory[address] = value  # the hours are latched, and can be read
    assert memory[0xA000] == 0
    emulator.close()


@pytest.mark.parametrize("address", [0x7F00, 0x7FFE, 0x7FFF])
def test_a_list_at_the_end_of_a_bank_can_be_read(address: int) -> None:
    cartridge = rom()
    emulator = Emulator(cartridge)
    listed = bytes(emulator.read(address, 256, 1))
    within = min(address + 256, 0x8000) - address
    assert listed[: within - 1] == cartridge[address : address + within - 1]
    emulator.close()
