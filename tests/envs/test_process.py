"""Environments in a process of their own: only plain values cross over, and a kill is a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, Literal

import pytest

from ludic.envs import EnvRunner, LudicEnv, ProcessEnv, TicTacToeEnv, build_env
from ludic.envs.process import EnvProcesses
from ludic.errors import ConfigError, DeadlineError, EnvError
from ludic.registry import register_env, stored_names, unregister_env
from ludic.rewards import make_rewards
from ludic.rollouts import ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.types import EnvSpec, StepOutcome
from ludic.workers.child_process import ChildError, ChildProcess
from ludic.workers.threads import EnvThreads
from tests.agents.scripted import scripted_runtime
from tests.envs.odd_envs import CountEnv, ProcessAsyncEnv, ProcessCountEnv, ProcessOddEnv
from tests.envs.waiting import eventually

pytestmark = pytest.mark.integration

TIC_TAC_TOE = EnvSpec("tic_tac_toe", {"opponent": "mixed", "mark": "random"})


@asynccontextmanager
async def running(env: LudicEnv[Any, Any, Any], **options: Any) -> AsyncIterator[EnvRunner]:
    runner = EnvRunner(env, **options)
    try:
        await runner.reset(5)
        yield runner
    finally:
        await runner.close()


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
        # Its first thread may have ended before the others.
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except FileNotFoundError:
        return False


async def gone(pid: int) -> None:
    await eventually(lambda: not is_running(pid))


def echo_pid(setup: Any) -> Any:
    """The child of the ChildProcess tests."""

    def answer(message: Any) -> Any:
        if message == "sleep":
            time.sleep(600)
        return {"pid": os.getpid(), "setup": setup, "message": message}

    return answer


class TestPlaying:
    async def test_it_plays_the_same_episode_as_in_this_process(self) -> None:
        local = TicTacToeEnv(**TIC_TAC_TOE.kwargs)
        async with (
            running(build_env(TIC_TAC_TOE, isolation="process")) as there,
            running(local) as here,
        ):
            assert there.agent_ids == here.agent_ids
            assert there.suggested_sysprompt("agent") == here.suggested_sysprompt("agent")
            assert there.env.current_obs() == here.env.current_obs()
            while not here.done:
                free = here.env.current_obs()["agent"].rpartition("Free: ")[2].split()
                action = {"agent": free[0]}
                assert await there.step(action) == await here.step(action)
                assert there.active_agents == here.active_agents
            assert there.done

    @pytest.mark.parametrize("kind", [ProcessCountEnv, ProcessAsyncEnv])
    async def test_an_environment_that_asks_for_it_gets_a_process(
        self, kind: type[CountEnv]
    ) -> None:
        env = build_env(EnvSpec("count", {"end": 1}), kind)
        assert isinstance(env, ProcessEnv)
        async with running(env) as runner:
            assert runner.task_key() == "count to 1"
            assert await runner.step({"agent": "x"}) == {
                "agent": StepOutcome("x 1", 0.5, terminated=True)
            }

    async def test_one_that_a_script_registered_gets_a_process_too(self) -> None:
        register_env("isolated_count", ProcessCountEnv)
        try:
            async with running(build_env(EnvSpec("isolated_count", {"end": 1}))) as runner:
                assert (await runner.step({"agent": "x"}))["agent"].terminated
        finally:
            unregister_env("isolated_count")

    async def test_others_stay_in_this_process(self) -> None:
        assert isinstance(build_env(TIC_TAC_TOE), TicTacToeEnv)
        assert isinstance(build_env(EnvSpec("c"), ProcessCountEnv, isolation="thread"), CountEnv)

    async def test_what_it_prints_does_not_disturb(self) -> None:
        async with running(build_env(EnvSpec("odd", {}), ProcessOddEnv)) as runner:
            assert (await runner.step({"agent": "print"}))["agent"].obs == "print 1"

    async def test_large_observations_cross_over(self) -> None:
        async with running(build_env(EnvSpec("odd", {}), ProcessOddEnv)) as runner:
            assert len((await runner.step({"agent": "big"}))["agent"].obs) == 1_000_000


class TestFailing:
    async def test_one_that_hangs_is_killed_and_holds_no_thread(self) -> None:
        threads = EnvThreads()
        env = build_env(EnvSpec("odd", {}), ProcessOddEnv)
        async with running(env, step_timeout_s=30, threads=threads) as runner:
            child = int((await runner.step({"agent": "child"}))["agent"].obs)
            assert is_running(child)
            runner.step_timeout_s = 0.2
            with pytest.raises(DeadlineError, match="step 2 from environment odd"):
                await runner.step({"agent": "hang"})
            await eventually(lambda: threads.abandoned == 0)
            await gone(child)  # what it had started is gone too

    @pytest.mark.parametrize(
        ("action", "says"),
        [
            ("raise", "ValueError: a bad move"),
            ("exit", "SystemExit: 3"),
            ("die", "ended while step was due"),
            ("nan", "the reward nan"),
            ("not json", "not JSON"),
        ],
    )
    async def test_what_goes_wrong_there_is_an_env_error_here(self, action: str, says: str) -> None:
        async with running(build_env(EnvSpec("odd", {}), ProcessOddEnv)) as runner:
            with pytest.raises(EnvError, match=f"environment odd.*{says}"):
                await runner.step({"agent": action})

    async def test_cancelling_kills_it(self) -> None:
        env = build_env(EnvSpec("odd", {}), ProcessOddEnv)
        async with running(env) as runner:
            child = int((await runner.step({"agent": "child"}))["agent"].obs)
            step = asyncio.create_task(runner.step({"agent": "hang"}))
            await asyncio.sleep(0.05)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            await gone(child)

    async def test_arguments_it_does_not_take_are_said(self) -> None:
        runner = EnvRunner(build_env(EnvSpec("count", {"no_such": 1}), ProcessCountEnv))
        with pytest.raises(EnvError, match="no_such"):
            await runner.reset(0)
        await runner.close()

    def test_arguments_that_are_not_json_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="must be JSON"):
            build_env(EnvSpec("count", {"end": object()}), ProcessCountEnv)

    def test_a_factory_that_cannot_be_imported_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="cannot import"):
            build_env(EnvSpec("count", {}), lambda: CountEnv(), isolation="process")

    def test_before_a_reset_it_says_that_it_does_not_know(self) -> None:
        env = ProcessEnv(TIC_TAC_TOE)
        with pytest.raises(EnvError, match="reset it to know its agent_ids"):
            _ = env.agent_ids
        env.close()
        with pytest.raises(EnvError, match="closed"):
            env.reset(seed=0)


class PidEnv(CountEnv):
    """Tells the number of its process, and leaves behind what its action says."""

    isolation: ClassVar[Literal["thread", "process"]] = "process"

    def env_step(self, action: str) -> StepOutcome:
        if action == "leave a process":
            subprocess.Popen(["sleep", "600"])
        elif action == "leave a thread":
            threading.Thread(target=time.sleep, args=(600,)).start()
        elif action == "leave home":
            os.chdir("/")
        elif action == "raise":
            raise ValueError("a bad move")
        elif action == "hang":
            time.sleep(600)
        return StepOutcome(str(os.getpid()), 0.0)


class OtherPidEnv(PidEnv):
    """Another class, to which a process of the first is not given."""


async def pid_of_episode(
    action: str = "play", step_timeout_s: float = 60.0, kind: type[PidEnv] = PidEnv
) -> int:
    runner = EnvRunner(build_env(EnvSpec("pid"), kind))
    try:
        await runner.reset(1)
        pid = int((await runner.step({"agent": "tell"}))["agent"].obs)
        runner.step_timeout_s = step_timeout_s
        with suppress(EnvError, DeadlineError):
            await runner.step({"agent": action})
    finally:
        await runner.close()
    return pid


class TestReuse:
    async def test_one_process_serves_one_episode_after_another(self) -> None:
        first = await pid_of_episode()
        assert [await pid_of_episode() for _ in range(3)] == [first] * 3
        assert is_running(first)

    async def test_episodes_at_the_same_time_have_processes_of_their_own(self) -> None:
        pids = await asyncio.gather(*(pid_of_episode() for _ in range(3)))
        assert len(set(pids)) == 3

    @pytest.mark.parametrize(
        ("action", "step_timeout_s"),
        [
            ("leave a process", 60.0),
            ("leave a thread", 60.0),
            ("leave home", 60.0),
            ("raise", 60.0),
            ("hang", 0.2),
        ],
    )
    async def test_a_process_in_which_something_is_left_or_went_wrong_is_replaced(
        self, action: str, step_timeout_s: float
    ) -> None:
        first = await pid_of_episode(action, step_timeout_s)
        await gone(first)
        assert await pid_of_episode() != first

    async def test_one_that_died_while_it_was_idle_is_replaced(self) -> None:
        first = await pid_of_episode()
        os.kill(first, signal.SIGKILL)
        await gone(first)
        assert await pid_of_episode() != first

    async def test_another_environment_or_surrounding_gets_another_process(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = await pid_of_episode()
        assert await pid_of_episode(kind=OtherPidEnv) != first
        monkeypatch.setenv("LUDIC_TEST_SURROUNDING", "another")
        assert await pid_of_episode() != first

    async def test_no_more_than_so_many_are_kept(self) -> None:
        processes = EnvProcesses(max_idle=1)
        taken = [processes.take("module:name", name=str(n)) for n in range(2)]
        for process in taken:
            processes.bring_back("module:name", process)
        assert [process.is_alive for process in taken] == [False, True]
        assert processes.take("module:name", name="again") is taken[1]
        processes.bring_back("module:name", taken[1])
        processes.close()
        assert not taken[1].is_alive


async def test_an_engine_isolates_what_it_is_told_to() -> None:
    protocol = ProtocolSpec("single_agent", {"parser": {"kind": "text"}})
    request = RolloutRequest(EnvSpec("here", {}), protocol)
    own: dict[str, Any] = {"here": HereEnv}
    found = []
    for isolated in ((), ("here",)):
        runtime = scripted_runtime(["a"])
        engine = RolloutEngine(own, runtime=runtime, isolated=isolated)
        (rollout,) = await engine.generate_rollouts([request], max_steps=1)
        found.append(int(rollout.env_steps[0].next_obs))
    assert found[0] == os.getpid() != found[1]


class HereEnv(CountEnv):
    """Says where it runs; it does not ask for a process itself."""

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome(str(os.getpid()), 0.0, terminated=True)


class TestChildProcess:
    def test_questions_are_answered_in_another_process(self) -> None:
        process = ChildProcess(f"{__name__}:echo_pid", {"a": 1}, name="echo")
        answer = process.ask([1, "é", None], timeout_s=60)
        assert answer["pid"] != os.getpid()
        assert (answer["setup"], answer["message"]) == ({"a": 1}, [1, "é", None])
        assert process.ask("x" * 3_000_000, timeout_s=60)["message"] == "x" * 3_000_000
        process.close()

    def test_a_late_answer_is_a_deadline_error_and_kills(self) -> None:
        process = ChildProcess(f"{__name__}:echo_pid", None, name="echo")
        pid = process.ask("hello", timeout_s=60)["pid"]
        with pytest.raises(DeadlineError, match="an answer from echo"):
            process.ask("sleep", timeout_s=0.1)
        with pytest.raises(ChildError):
            process.ask("hello", timeout_s=1)
        process.close()
        assert not is_running(pid)

    def test_it_ends_when_the_parent_goes_away(self) -> None:
        process = ChildProcess(f"{__name__}:echo_pid", None, name="echo")
        pid = process.ask("hello", timeout_s=60)["pid"]
        process._frames.close()
        asyncio.run(gone(pid))
        process.close()

    def test_a_factory_that_is_not_there_is_said(self) -> None:
        process = ChildProcess("ludic.envs.process:no_such", None, name="nothing")
        with pytest.raises(ChildError, match="no_such"):
            process.ask("hello", timeout_s=60)
        process.close()


class JudgedEnv(CountEnv):
    """Makes its reward from a spec, in its own process."""

    isolation: ClassVar[Literal["thread", "process"]] = "process"

    def __init__(self, reward: str) -> None:
        super().__init__()
        self.judge = make_rewards(reward)


async def test_an_environments_process_knows_that_its_names_are_stored() -> None:
    spec = EnvSpec(f"{__name__}:JudgedEnv", {"reward": "tests.envs.test_process:a_reward"})
    async with running(build_env(spec)) as runner:
        assert runner.agent_ids == ("agent",)
    with stored_names():
        env = build_env(spec)
    with pytest.raises(EnvError, match=r"stored data.*register_reward"):
        async with running(env):
            pass


def a_reward() -> Any:
    return lambda attempt: 1.0
