"""Programs as agents: what becomes of their runs."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ludic.agents.programs import ProgramAgent
from ludic.envs.tic_tac_toe import TwoPlayerTicTacToeEnv
from ludic.errors import ConfigError
from ludic.interaction import ProgramAttempt, ProgramProtocol, RunSpec, SingleAgentSyncProtocol
from ludic.interaction.factories import build_agent
from ludic.interaction.multi_agent import multi_agent_protocol
from ludic.interaction.program import program_protocol
from ludic.registry import make_protocol, stored_names
from ludic.rewards import numeric_reward
from ludic.types import Rollout, StepOutcome, TruncationReason
from tests.agents.scripted import Script, scripted_runtime
from tests.interaction.program_things import asks_once, complete, solve
from tests.interaction.worlds import Countdown

THINGS = Path(__file__).parent / "program_things.py"
SPEC = RunSpec("episode", env_seed=1, sampling_seed=2)
ANSWERS = ["one", "two"]


def command(what: str) -> list[str]:
    return [sys.executable, str(THINGS), what]


async def played(
    script: Script = ANSWERS, env: Any = None, client: dict[str, Any] | None = None, **kwargs: Any
) -> Rollout:
    """The rollout of a program's episode."""
    runtime = scripted_runtime(script, **(client or {}))
    protocol = program_protocol(runtime, **kwargs)
    (rollout,) = await protocol.run(env or Countdown(1), SPEC)
    return rollout


@pytest.mark.integration
async def test_a_command_does_the_task_and_the_environment_judges_what_it_prints() -> None:
    env = Countdown(1)
    rollout = await played(env=env, command=command("solve"))
    assert rollout.error is None
    assert (rollout.terminated, rollout.total_reward, env.actions) == (True, 1.0, ["two"])
    (turn,) = rollout.turns()
    assert [step.message["content"] for step in turn.agent_steps] == ["one", "two"]
    assert turn.agent_steps[0].new_messages == ({"role": "user", "content": "1 left"},)
    assert turn.agent_steps[1].fork is None
    assert env.closed == 1


async def test_a_function_is_called_with_the_address_and_the_key() -> None:
    rollout = await played(function=solve)
    assert (rollout.error, rollout.total_reward) == (None, 1.0)
    assert len(rollout.agent_steps) == 2


async def test_an_async_function_may_run_on_the_same_loop() -> None:
    here = threading.get_ident()

    async def agent(task: str, *, base_url: str, api_key: str) -> str:
        assert threading.get_ident() == here
        said = await asyncio.to_thread(
            complete, [{"role": "user", "content": task}], base_url, api_key
        )
        return str(said["content"])

    rollout = await played(function=agent)
    assert (rollout.error, len(rollout.agent_steps)) == (None, 1)


async def test_a_program_is_started_for_every_observation() -> None:
    rollout = await played(["a", "b", "c", "d"], Countdown(2), function=solve)
    assert [turn.reward for turn in rollout.turns()] == [1.0, 2.0]
    assert [len(turn.agent_steps) for turn in rollout.turns()] == [2, 2]
    assert [s.fork is not None for s in rollout.agent_steps] == [False, False, True, False]


@pytest.mark.integration
async def test_the_system_prompt_and_the_models_name_are_variables() -> None:
    env = Countdown(1)
    await played(env=env, command=command("system"))
    assert env.actions == ["two\nCount down. scripted"]


async def test_the_parser_reads_what_a_program_prints() -> None:
    parser = {"kind": "xml", "tag": "move", "error_reward": -0.5}
    env = Countdown(1)
    rollout = await played(["x", "<move>up</move>"], env, function=solve, parser=parser)
    assert (env.actions, rollout.total_reward) == (["up"], 1.0)
    env = Countdown(1)
    rollout = await played(["x", "y", "x", "<move>up</move>"], env, function=solve, parser=parser)
    assert (env.actions, rollout.total_reward) == (["up"], 0.5)
    assert [turn.env_step.stepped for turn in rollout.turns() if turn.env_step] == [False, True]


@pytest.mark.integration
async def test_a_status_other_than_zero_costs_the_episode_with_its_last_words() -> None:
    rollout = await played(command=command("crash"))
    assert rollout.error is not None
    assert "ended with status 1: no luck" in rollout.error
    assert rollout.truncation_reason is TruncationReason.ERROR
    assert len(rollout.agent_steps) == 2


@pytest.mark.integration
async def test_a_program_that_asks_nothing_is_no_sample() -> None:
    rollout = await played(command=command("silent"))
    assert rollout.error is not None
    assert "got no answer from the model" in rollout.error
    assert not rollout.agent_steps


@pytest.mark.integration
async def test_a_deadline_costs_the_episode_and_keeps_what_was_sampled() -> None:
    for seconds in (2.0, 8.0, 32.0):  # a slow machine may need longer for its requests
        rollout = await played(command=command("hang"), timeout_s=seconds)
        assert rollout.error is not None
        assert "deadline passed" in rollout.error
        if len(rollout.agent_steps) == 2:
            break
    assert len(rollout.agent_steps) == 2
    assert rollout.truncation_reason is TruncationReason.DEADLINE


@pytest.mark.integration
async def test_a_full_context_is_an_ending_and_not_an_error() -> None:
    rollout = await played(client={"max_context_tokens": 400}, command=command("full"))
    assert rollout.error is None
    assert rollout.truncation_reason is TruncationReason.CONTEXT_WINDOW
    assert len(rollout.agent_steps) == 2


async def test_so_is_a_spent_budget_of_calls() -> None:
    rollout = await played(function=solve, max_calls=1)
    assert rollout.error is None
    assert rollout.truncation_reason is TruncationReason.BUDGET
    assert len(rollout.agent_steps) == 1


async def test_a_backend_that_fails_is_named_as_the_cause() -> None:
    fault = {"fault": lambda call: RuntimeError("out of order") if call.index else None}
    rollout = await played(client=fault, function=solve)
    assert rollout.error is not None
    assert "HTTPError" in rollout.error
    assert "out of order" in rollout.error


def tools_free(attempt: ProgramAttempt) -> float:
    return float(attempt.question == "1 left" and attempt.answer == "two")


async def test_a_reward_function_speaks_instead_of_the_environment() -> None:
    seen: list[ProgramAttempt] = []

    def judge(attempt: ProgramAttempt) -> float:
        seen.append(attempt)
        return 7.0

    rollout = await played(function=solve, reward=[judge, tools_free])
    assert (rollout.error, rollout.terminated, rollout.total_reward) == (None, True, 8.0)
    (step,) = rollout.env_steps
    assert step.reward_components == {"judge": 7.0, "tools_free": 1.0, "parser": 0.0}
    (attempt,) = seen
    assert [m["content"] for m in attempt.messages] == ["1 left", "one", "Sure?", "two"]
    assert (attempt.status, attempt.answer, attempt.stdout) == (0, "two", "two")
    assert isinstance(attempt.outcome, StepOutcome)
    assert attempt.outcome.reward == 1.0
    assert attempt.info == {"seed": 1}
    assert attempt.task_key == "countdown-1"


async def test_a_reward_function_may_be_async_and_named_by_its_place() -> None:
    async def later(attempt: ProgramAttempt) -> float:
        await asyncio.sleep(0)
        return 0.5

    assert (await played(function=solve, reward=later)).total_reward == 0.5
    place = "tests.interaction.program_things:brief"
    assert (await played(function=solve, reward=place)).total_reward == pytest.approx(0.6)
    named = {"kind": "length", "limit": 10}
    assert (await played(function=solve, reward=named)).total_reward == 1.0


@pytest.mark.integration
async def test_a_reward_function_judges_crashes_and_deadlines_too() -> None:
    def status(attempt: ProgramAttempt) -> float:
        return -2.0 if attempt.status is None else -1.0 * attempt.status

    rollout = await played(command=command("crash"), reward=status)
    assert (rollout.error, rollout.terminated) == (None, True)
    (step,) = rollout.env_steps
    # The parser says what it thinks of no answer, as always.
    assert step.reward_components == {"status": -1.0, "parser": -0.1}
    assert step.info["status"] == 1
    for seconds in (2.0, 8.0, 32.0):
        rollout = await played(command=command("hang"), reward=status, timeout_s=seconds)
        if len(rollout.agent_steps) == 2:
            break
    assert (rollout.error, rollout.total_reward) == (None, -2.1)
    assert rollout.truncation_reason is TruncationReason.DEADLINE
    rollout = await played(command=command("silent"), reward=status)
    assert rollout.error is not None


async def test_a_reward_that_fails_costs_the_episode_and_keeps_the_calls() -> None:
    rollout = await played(function=solve, reward=numeric_reward())
    assert rollout.error is not None
    assert "not a number" in rollout.error
    assert len(rollout.agent_steps) == 2


async def test_a_program_may_take_the_seat_of_any_agent() -> None:
    agent = build_agent(scripted_runtime(ANSWERS), agent="program", function=solve)
    assert isinstance(agent, ProgramAgent)
    (rollout,) = await SingleAgentSyncProtocol(agent).run(Countdown(1), SPEC)
    assert rollout.total_reward == 1.0


async def test_a_program_plays_against_a_bot() -> None:
    protocol = multi_agent_protocol(
        scripted_runtime(["A1", "B1", "C1"]),
        seats={
            "X": {"agent": "program", "function": asks_once},
            "O": {"bot": "sequence", "actions": ["A3", "B3"]},
        },
    )
    (rollout,) = await protocol.run(TwoPlayerTicTacToeEnv(), SPEC)
    assert (rollout.error, rollout.agent_id, rollout.terminated) == (None, "X", True)
    assert [turn.env_step.action for turn in rollout.turns() if turn.env_step] == ["A1", "B1", "C1"]


async def test_seeds_are_those_of_any_agent() -> None:
    asked: list[int | None] = []

    def say(call: Any) -> str:
        asked.append(call.request.sampling.seed)
        return "x"

    first = await played(say, function=solve)
    again = await played(say, function=solve)
    assert first.steps == again.steps
    assert asked[:2] == asked[2:]
    assert len(set(asked)) == 2


@pytest.mark.integration
async def test_the_task_stands_among_the_arguments_without_a_shell(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from program_things import *;"
        "complete([{'role': 'user', 'content': 'x'}], os.environ['OPENAI_BASE_URL'],"
        " os.environ['OPENAI_API_KEY']); print(sys.argv[2])"
    )
    env = Countdown(1)
    line = [sys.executable, "-c", code, str(THINGS.parent), "<{task}; $(rm -rf /)>"]
    rollout = await played(env=env, command=line, cwd=str(tmp_path))
    assert (rollout.error, env.actions) == (None, ["<1 left; $(rm -rf /)>"])


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({}, "either a `command` or a `function`"),
        ({"command": ["ls"], "function": solve}, "either a `command` or a `function`"),
        ({"command": "python agent.py"}, "give a list"),
        ({"command": ["no-such-program-anywhere"]}, "there is no program"),
        ({"command": ["./nothing.sh"]}, "there is no program"),
        ({"command": ["ls"], "cwd": "/nowhere/at/all"}, "no such folder"),
        ({"command": ["ls"], "pass_env": ["NOT_SET_AT_ALL"]}, "are not set"),
        ({"command": ["ls"], "timeout_s": 0}, "must be above 0"),
        ({"function": "no_such_module:f"}, "no_such_module"),
        ({"function": "solver"}, "unknown program 'solver'"),
        ({"function": solve, "reward": "nope"}, "unknown reward"),
        ({"function": solve, "comand": ["ls"]}, "comand"),
        ({"agent": "tool"}, "plays with a program"),
    ],
)
def test_a_program_that_cannot_be_started_is_refused_at_once(
    kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, KeyError), match=said):
        make_protocol("program", scripted_runtime(ANSWERS), **kwargs)


def test_stored_data_starts_no_program() -> None:
    runtime = scripted_runtime(ANSWERS)
    with stored_names(), pytest.raises(ConfigError, match="none is started for it"):
        make_protocol("program", runtime, command=["ls"])
    with stored_names(), pytest.raises(ConfigError, match="none is started for it"):
        make_protocol("single_agent", runtime, agent="program", command=["ls"])


def test_the_protocol_is_for_programs_only() -> None:
    agent = build_agent(scripted_runtime(ANSWERS))
    with pytest.raises(ConfigError, match="ProgramAgent"):
        ProgramProtocol(agent)  # type: ignore[arg-type]
