"""A game is won by programs that are written in several turns, with the compiler's help."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ludic.agents import Agent
from ludic.context import make_context
from ludic.envs.code_exec.sandbox.pool import SandboxPool
from ludic.envs.rustorio import RustorioEnv
from ludic.envs.rustorio.crate import build_game
from ludic.errors import ConfigError
from ludic.inference import HFChatTemplate, ScriptedChatClient
from ludic.inference.tiny import tiny_tokenizer
from ludic.interaction import RunSpec, SingleAgentSyncProtocol
from ludic.parsers import text_parser
from ludic.plumbing.lazy import stored_names
from ludic.types import StepOutcome
from tests.envs.rustorio.conftest import MODE, STAGES, WINS, program

pytestmark = [pytest.mark.sandbox, pytest.mark.rust, pytest.mark.timeout(300)]

Make = Callable[..., RustorioEnv]
TWICE = """
    let Start { bricks, .. } = start;
    let first = Oven::build(&tick, bricks);
    let second = Oven::build(&tick, bricks);
    todo!()"""


def answer(env: RustorioEnv, action: str) -> StepOutcome:
    outcome = env.env_step(action)
    assert isinstance(outcome, StepOutcome)
    return outcome


async def test_a_scripted_agent_wins_in_several_turns(crate: Path, programs: SandboxPool) -> None:
    answers = iter(
        [
            "read bakery/buildings.rs",
            program("let oven = Oven::built(&tick, start.bricks); todo!()"),
            program(TWICE),
            program(WINS.replace("tick.advance_by(15);", "tick.advance_by(4);")),
            program(WINS),
        ]
    )
    template = HFChatTemplate(tiny_tokenizer())
    client = ScriptedChatClient(lambda call: next(answers), template)
    agent = Agent(client, "scripted", make_context("full_dialog"), text_parser(), template)
    env = RustorioEnv(crate=str(crate), mode=MODE, stages=STAGES, pool=programs)
    (rollout,) = await SingleAgentSyncProtocol(agent).run(env, RunSpec("episode", max_steps=9))
    steps = [turn.env_step for turn in rollout.turns() if turn.env_step is not None]
    assert [step.info["result"] for step in steps] == [
        "read", "no_compile", "no_compile", "lost", "won"
    ]  # fmt: skip
    seen = [str(step.next_obs) for step in steps]
    assert "Costs four bricks." in seen[0]
    assert "error[E0599]" in seen[1]
    assert "`built`" in seen[1]
    assert "error[E0382]" in seen[2]
    assert "`bricks`" in seen[2]
    assert "called `Option::unwrap()` on a `None` value" in seen[3]
    assert "Stages reached: wheat, oven." in seen[3]
    assert "You won in 27 ticks." in seen[4]
    assert [step.reward for step in steps] == [0, 0, 0, 0.5, 0.5]
    assert steps[-1].terminated
    assert steps[-1].info["ticks"] == 27


def test_the_first_observation_has_the_task_the_stages_and_the_files(make: Make) -> None:
    text = make(par_ticks=20).env_current_obs()
    assert f"type Victory = <{MODE} as GameMode>::VictoryResources;" in text
    assert "stages::oven(&value), a bakery::buildings::Oven" in text
    assert "within 20 ticks" in text
    assert "bakery/buildings.rs" in text
    assert "bakery_engine/lib.rs" in text
    assert "build.rs" not in text
    assert "shop" not in text


def test_only_what_is_better_than_before_is_rewarded(make: Make) -> None:
    env = make(par_ticks=27, max_attempts=4)
    slow = program(WINS.replace("advance_by(15)", "advance_by(42)"))
    first = answer(env, slow)
    assert first.info["ticks"] == 54
    assert not first.terminated
    assert first.reward_components == {"stages": 0.5, "victory": 0.25}
    assert answer(env, slow).reward == 0.0
    assert answer(env, program("todo!()")).reward == 0.0
    last = answer(env, program(WINS))
    assert last.reward == 0.25
    assert last.terminated
    assert env.return_range == (0.0, 1.0)


def test_the_attempts_are_bounded(make: Make) -> None:
    env = make(max_attempts=2)
    assert not answer(env, "read nowhere.rs").terminated
    outcome = answer(env, "")
    assert outcome.terminated
    assert outcome.info["result"] == "no_code"


def test_errors_are_bounded_and_name_no_folder_of_this_machine(make: Make, crate: Path) -> None:
    wrong = "\n".join(f"let a{n}: u8 = {'x' * 3000!r};" for n in range(9)).replace("'", '"')
    outcome = answer(make(max_errors=2), program(f"{wrong} todo!()"))
    assert outcome.obs.count("error[E0308]") == 2
    assert "and 7 more errors" in outcome.obs
    assert len(outcome.obs) < 4000
    twice = answer(make(), program(TWICE)).obs
    assert "player.rs:" in twice
    assert str(crate.parent) not in twice


def test_a_function_of_another_type_or_no_function_does_not_compile(make: Make) -> None:
    env = make()
    without = answer(env, "```rust\npub fn other() {}\n```")
    assert "user_main" in without.obs
    assert without.info["result"] == "no_compile"
    other = "```rust\npub fn user_main(n: u32) -> u32 { n }\n```"
    assert "error[E0061]" in answer(env, other).obs


def test_the_game_is_built_once_per_process(make: Make, crate: Path) -> None:
    make()
    assert build_game(str(crate), MODE, STAGES) is build_game(str(crate), MODE, STAGES)


def test_only_what_the_library_uses_goes_into_the_sandbox(crate: Path) -> None:
    names = [name.split("-")[0] for name in build_game(str(crate), MODE, STAGES).files]
    assert sorted(names) == [
        "deps/libbakery.rlib", "deps/libbakery_engine", "deps/libbakery_goods",
        "deps/libludic_stages.rlib", "deps/libludic_std.rlib", "lib.rs", "main.rs",
    ]  # fmt: skip


def test_a_crate_that_does_not_build_says_why(crate: Path, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "lib.rs").write_text('pub fn broken() -> u32 { "text" }\n')
    (tmp_path / "Cargo.toml").write_text('[package]\nname = "broken"\nedition = "2024"\n')
    with pytest.raises(ConfigError, match=r"cargo could not build the crate .*broken|mismatched"):
        build_game(str(tmp_path), "broken::Mode", {})
    with pytest.raises(ConfigError, match=r"stages .* do not fit bakery: .*Ovens"):
        build_game(str(crate), MODE, {"oven": "bakery::buildings::Ovens"})


def test_settings_that_cannot_be_meant_are_refused() -> None:
    for wrong, why in (
        ({"mode": "Tutorial; evil()"}, "a path such as"),
        ({"stages": {"begin": "u8"}}, "and not 'begin'"),
        ({"stages": {"a b": "u8"}}, "small letters"),
        ({"stage_share": 2.0}, "a share from 0 to 1"),
        ({"max_attempts": 0}, "at least one"),
        ({"par_ticks": 0}, "must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=re.escape(why)):
            RustorioEnv(crate="anywhere", **wrong)
    with stored_names(), pytest.raises(ConfigError, match="stored data names the crate"):
        RustorioEnv(crate="anywhere")
