"""A failure in the user's own code names its file and line, wherever the episode was played."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from ludic.envs import SingleAgentEnv
from ludic.errors import EnvError, RolloutError
from ludic.parsers import ParseResult
from ludic.plumbing.text import TRACEBACK, described, place_of
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.types import Action, Info, Obs, StepOutcome
from tests.rollouts.worlds import PLAIN, runtime

HERE = Path(__file__).name
LINES = Path(__file__).read_text(encoding="utf-8").splitlines()


def line_of(mark: str) -> int:
    (number,) = (n for n, line in enumerate(LINES, 1) if line.endswith(f"# {mark}"))
    return number


class Faulty(SingleAgentEnv):
    """Raises where it is told to."""

    blocking: ClassVar[bool] = False

    def __init__(self, where: str) -> None:
        self.where = where
        if where == "init":
            raise KeyError("no such level")  # here: init

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        if self.where == "reset":
            raise ValueError("no seed")  # here: reset
        return "Go.", {}

    def env_step(self, action: Action) -> StepOutcome:
        if self.where == "contract":
            raise EnvError("the user's own words")  # here: contract
        return StepOutcome("", _score(), terminated=True)

    def env_current_obs(self) -> Obs:
        return "Go."


class InThread(Faulty):
    blocking: ClassVar[bool] = True


class InProcess(Faulty):
    blocking: ClassVar[bool] = True
    isolation: ClassVar[Literal["thread", "process"]] = "process"


class Awaited(Faulty):
    async def env_step(self, action: Action) -> StepOutcome:  # type: ignore[override]
        return StepOutcome("", _score(), terminated=True)


def _score() -> float:
    return 1 / 0  # here: step


def careless(text: str) -> ParseResult:
    return ParseResult(text.split()[7])  # here: parse


def engine(max_failure_rate: float = 1.0) -> RolloutEngine:
    envs = {kind.__name__: kind for kind in (Faulty, InThread, Awaited)}
    return RolloutEngine(env_registry=envs, runtime=runtime(), max_failure_rate=max_failure_rate)


@pytest.mark.parametrize("kind", ["Faulty", "InThread", "Awaited"])
@pytest.mark.parametrize("where", ["init", "reset", "step", "contract"])
async def test_an_exception_names_the_users_file_and_line(kind: str, where: str) -> None:
    where = "step" if (kind, where) == ("Awaited", "contract") else where
    request = RolloutRequest(EnvSpec(kind, {"where": where}), PLAIN)
    (rollout,) = await engine().generate_rollouts([request])
    assert rollout.error is not None
    assert f"{HERE}, line {line_of(f'here: {where}')}, in " in rollout.error
    assert LINES[line_of(f"here: {where}") - 1].strip() in rollout.meta[TRACEBACK]


async def test_so_does_one_in_a_process_of_its_own() -> None:
    request = RolloutRequest(EnvSpec(f"{__name__}:InProcess", {"where": "step"}), PLAIN)
    (rollout,) = await RolloutEngine(runtime=runtime()).generate_rollouts([request])
    assert f"{HERE}, line {line_of('here: step')}, in _score" in str(rollout.error)


async def test_and_one_in_a_parser() -> None:
    protocol = ProtocolSpec("single_agent", {"parser": {"kind": f"{__name__}:careless_parser"}})
    request = RolloutRequest(EnvSpec("Faulty", {"where": "nowhere"}), protocol)
    (rollout,) = await engine().generate_rollouts([request])
    assert f"{HERE}, line {line_of('here: parse')}, in careless" in str(rollout.error)


def careless_parser() -> object:
    return careless


async def test_the_error_of_a_whole_call_has_the_line_and_prints_the_traceback() -> None:
    requests = [RolloutRequest(EnvSpec("Faulty", {"where": "step"}), PLAIN)] * 12
    with pytest.raises(RolloutError) as caught:
        await engine(max_failure_rate=0.5).generate_rollouts(requests)
    place = f"{HERE}, line {line_of('here: step')}, in _score"
    assert place in str(caught.value)
    assert str(caught.value).count("ZeroDivisionError") == 1  # the same cause, counted
    printed = "".join(traceback.format_exception(caught.value))
    assert "return 1 / 0  # here: step" in printed
    assert "return StepOutcome(" in printed


def test_an_error_that_came_from_no_code_of_the_users_has_no_place() -> None:
    assert place_of(EnvError("made and not raised")) is None
    assert described(EnvError("made and not raised")) == "EnvError: made and not raised"
