"""Environments and tools that raise what is no `Exception`, or hand over what cannot be stored."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ludic.agents.tools import Tool, call_tool
from ludic.errors import DeadlineError, RolloutError
from ludic.plumbing.text import REPLACEMENT
from ludic.rollouts import EnvSpec, RolloutEngine, RolloutRequest, RolloutWriter, read_rollouts
from ludic.rollouts.engine import run_bounded
from ludic.types import Action, Info, Obs, Rollout, StepOutcome, to_json
from tests.rollouts.worlds import PLAIN, GuessEnv, runtime


class Bare(BaseException):
    """What an `except Exception` does not see."""


ESCAPES: dict[str, Callable[[], BaseException]] = {
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "Bare": lambda: Bare("out of here"),
    "SystemExit": lambda: SystemExit(3),
}
PLACES = ("__init__", "reset", "step", "suggested_sysprompt", "task_key", "active_agents")


class Escaping(GuessEnv):
    """Raises `what` in `place`, directly."""

    def __init__(self, what: str, place: str) -> None:
        super().__init__()
        self.what, self.place = what, place
        self._at("__init__")

    def _at(self, place: str) -> None:
        if self.place == place:
            raise ESCAPES[self.what]()

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self._at("reset")
        return super().env_reset(seed=seed)

    def env_step(self, action: Action) -> StepOutcome:
        self._at("step")
        return super().env_step(action)

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        self._at("suggested_sysprompt")
        return None

    def task_key(self) -> str | None:
        self._at("task_key")
        return None

    @property
    def active_agents(self) -> Any:
        self._at("active_agents")
        return super().active_agents


class EscapingInThread(Escaping):
    blocking: ClassVar[bool] = True


class EscapingAsync(Escaping):
    async def env_step(self, action: Action) -> StepOutcome:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().env_step(action)


def _engine(**envs: Any) -> RolloutEngine:
    return RolloutEngine(env_registry=envs, runtime=runtime(lambda call: "1"), max_failure_rate=1.0)


@pytest.mark.parametrize("what", list(ESCAPES))
@pytest.mark.parametrize("kind", [Escaping, EscapingInThread, EscapingAsync])
async def test_what_is_no_exception_costs_one_episode_with_its_cause(kind: Any, what: str) -> None:
    engine = _engine(bad=kind, good=GuessEnv)
    places = ("step",) if kind is EscapingAsync else PLACES
    requests = [RolloutRequest(EnvSpec("bad", {"what": what, "place": p}), PLAIN) for p in places]
    requests.append(RolloutRequest(EnvSpec("good"), PLAIN))
    rollouts = await engine.generate_rollouts(requests, 3, 2)
    assert len(rollouts) == len(requests)
    for place, rollout in zip(places, rollouts[:-1], strict=True):
        assert rollout.error is not None, place
        assert what in rollout.error, place
    assert rollouts[-1].error is None


async def test_a_cancellation_of_the_call_still_ends_it() -> None:
    class Waiting(GuessEnv):
        async def env_step(self, action: Action) -> StepOutcome:  # type: ignore[override]
            started.set()
            await asyncio.sleep(3600)
            raise AssertionError

    started = asyncio.Event()
    engine = _engine(waiting=Waiting)
    request = RolloutRequest(EnvSpec("waiting"), PLAIN)
    call = asyncio.ensure_future(engine.generate_rollouts([request], 3))
    async with asyncio.timeout(60):
        await started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_ctrl_c_is_not_an_episodes_failure() -> None:
    class Interrupted(GuessEnv):
        def env_step(self, action: Action) -> StepOutcome:
            raise KeyboardInterrupt

    from ludic.interaction.base import RunSpec
    from ludic.registry import make_protocol

    protocol = make_protocol("single_agent", runtime(lambda call: "1"), **PLAIN.kwargs)
    playing = protocol.run(Interrupted(), RunSpec("e", None, None, 3, None, None))
    with pytest.raises(KeyboardInterrupt):
        await playing


async def test_a_job_that_is_cancelled_by_itself_is_not_lost_without_a_word() -> None:
    async def run(job: int) -> int:
        raise asyncio.CancelledError

    jobs = run_bounded(range(3), run, 2)
    with pytest.raises(RolloutError, match="CancelledError"):
        await anext(jobs)


@pytest.mark.parametrize("what", list(ESCAPES))
async def test_what_a_tool_raises_is_an_answer_to_the_model(what: str) -> None:
    def plain() -> str:
        """Fails."""
        raise ESCAPES[what]()

    async def waiting() -> str:
        """Fails."""
        raise ESCAPES[what]()

    for function in (plain, waiting):
        tool = Tool.of(function)
        call: Any = {
            "id": "1",
            "type": "function",
            "function": {"name": tool.name, "arguments": {}},
        }
        result = await call_tool({tool.name: tool}, call, timeout_s=60)
        assert result.error is not None
        assert what in result.error


class Broken(GuessEnv):
    """Speaks in halves of surrogate pairs wherever it can."""

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        super().env_reset(seed=seed)
        return "open \ud800", {"key \ud800": ["\udfff"]}

    def env_step(self, action: Action) -> StepOutcome:
        info = {"deep": {"\ud800": "\ud83d\ude00"}}
        return StepOutcome(
            "over \udc00", 1.0, terminated=True, info=info, reward_components={"p\ud800": 1.0}
        )

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        return "be \ud800"

    def task_key(self) -> str | None:
        return "task \ud800"


async def test_text_that_cannot_be_encoded_is_cleaned_where_it_enters(tmp_path: Path) -> None:
    engine = _engine(broken=Broken)
    with RolloutWriter(tmp_path / "r.jsonl.zst") as writer:
        (rollout,) = await engine.generate_rollouts(
            [RolloutRequest(EnvSpec("broken"), PLAIN)], 3, writer=writer
        )
    assert rollout.error is None
    assert rollout.task_key == f"task {REPLACEMENT}"
    step = rollout.env_steps[0]
    assert (step.obs, step.next_obs) == (f"open {REPLACEMENT}", f"over {REPLACEMENT}")
    assert step.info == {"deep": {REPLACEMENT: "😀"}}
    assert step.reward_components[f"p{REPLACEMENT}"] == 1.0
    assert list(read_rollouts(tmp_path / "r.jsonl.zst")) == [rollout]


class Raising(GuessEnv):
    def env_step(self, action: Action) -> StepOutcome:
        raise RuntimeError("because \ud800")


async def test_an_error_that_cannot_be_encoded_is_cleaned_too() -> None:
    (rollout,) = await _engine(bad=Raising).generate_rollouts(
        [RolloutRequest(EnvSpec("bad"), PLAIN)], 3
    )
    assert rollout.error is not None
    assert f"because {REPLACEMENT} (" in rollout.error


class Changing(GuessEnv):
    """Hands out one dict again and again, and goes on writing into it."""

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self.facts: dict[str, Any] = {}
        super().env_reset(seed=seed)
        return "go", {}

    def env_step(self, action: Action) -> StepOutcome:
        self.facts["steps"] = self.facts.get("steps", 0) + 1
        self.facts.setdefault("actions", []).append(action)
        return StepOutcome("on", 0.0, terminated=self.facts["steps"] == 3, info=self.facts)


async def test_facts_that_change_after_a_step_are_recorded_as_they_were() -> None:
    (rollout,) = await _engine(changing=Changing).generate_rollouts(
        [RolloutRequest(EnvSpec("changing"), PLAIN)], 5
    )
    facts = [(step.info["steps"], len(step.info["actions"])) for step in rollout.env_steps]
    assert facts == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("key", [7, b"seven", ["a"]])
async def test_a_task_key_that_is_not_text_costs_the_episode(key: Any) -> None:
    class Misnamed(GuessEnv):
        def task_key(self) -> Any:
            return key

    (rollout,) = await _engine(misnamed=Misnamed).generate_rollouts(
        [RolloutRequest(EnvSpec("misnamed"), PLAIN)], 3
    )
    assert rollout.error is not None
    assert f"task_key gave a {type(key).__name__}" in rollout.error


class Slow(GuessEnv):
    """Is built when it is allowed to, and notes that it was closed."""

    blocking: ClassVar[bool] = True
    may_be_built: ClassVar[threading.Event]
    was_closed: ClassVar[threading.Event]

    def __init__(self) -> None:
        super().__init__()
        assert self.may_be_built.wait(60)

    def close(self) -> None:
        self.was_closed.set()


async def test_an_environment_that_is_built_after_its_deadline_is_closed() -> None:
    Slow.may_be_built, Slow.was_closed = threading.Event(), threading.Event()
    engine = RolloutEngine(
        env_registry={"slow": Slow}, runtime=runtime(lambda call: "1"), step_timeout_s=0.05,
        max_failure_rate=1.0,
    )  # fmt: skip
    (rollout,) = await engine.generate_rollouts([RolloutRequest(EnvSpec("slow"), PLAIN)], 3)
    assert rollout.error is not None
    assert rollout.error.startswith(DeadlineError.__name__)
    assert not Slow.was_closed.is_set()
    Slow.may_be_built.set()
    assert await asyncio.to_thread(Slow.was_closed.wait, 60)


class Unclosable(GuessEnv):
    def close(self) -> None:
        sys.exit("will not go")


async def test_an_error_in_close_is_a_line_of_warning(caplog: pytest.LogCaptureFixture) -> None:
    rollouts: list[Rollout] = []
    with caplog.at_level(logging.WARNING, "ludic.envs"):
        rollouts = await _engine(unclosable=Unclosable).generate_rollouts(
            [RolloutRequest(EnvSpec("unclosable"), PLAIN)], 3
        )
    assert [r.error for r in rollouts] == [None]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "Unclosable was not closed properly: SystemExit: will not go" in line


@pytest.mark.parametrize("name", ["half \ud800", 7])
async def test_an_agent_whose_name_cannot_be_stored_costs_the_episode(name: Any) -> None:
    class Misnamed(GuessEnv):
        @property
        def agent_ids(self) -> Any:
            return (name,)

    (rollout,) = await _engine(misnamed=Misnamed).generate_rollouts(
        [RolloutRequest(EnvSpec("misnamed"), PLAIN)], 3
    )
    assert rollout.error is not None
    assert "agent_ids names" in rollout.error
    to_json(rollout)


async def test_a_player_that_exits_among_others_costs_the_episode_and_not_the_loop() -> None:
    from ludic.interaction import MultiAgentProtocol, RunSpec
    from tests.agents.scripted import scripted_agent
    from tests.interaction.worlds import Duel

    def leave(obs: Obs) -> Action:
        sys.exit("enough")

    env = Duel()
    first, second = env.agent_ids
    protocol = MultiAgentProtocol({first: leave, second: scripted_agent(["<move>1</move>"] * 9)})
    (rollout,) = await protocol.run(env, RunSpec("e"))
    assert rollout.error == f"AgentError: agent {first!r} raised SystemExit: enough"
