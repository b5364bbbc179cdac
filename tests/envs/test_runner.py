"""The runner: every kind of environment is called rightly, in time, and held to its contract."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ludic.envs import EnvRunner, LudicEnv
from ludic.errors import ConfigError, DeadlineError, EnvError
from ludic.types import StepOutcome
from ludic.workers.threads import EnvThreads
from tests.envs.odd_envs import (
    AnyEnv,
    AsyncCountEnv,
    AsyncHangingEnv,
    AsyncRaisingEnv,
    BlockingRaisingEnv,
    CountEnv,
    DirectCountEnv,
    HalfAsyncCountEnv,
    HangingEnv,
    PartialEnv,
    ProcessCountEnv,
    RaisingEnv,
)
from tests.envs.waiting import eventually

OK = StepOutcome("", 0.0)
OVER = StepOutcome("", 1.0, terminated=True)


async def after_reset(env: LudicEnv[Any, Any, Any]) -> EnvRunner:
    runner = EnvRunner(env)
    await runner.reset(0)
    return runner


class TestCalling:
    @pytest.mark.parametrize("kind", [CountEnv, DirectCountEnv, AsyncCountEnv, HalfAsyncCountEnv])
    async def test_every_kind_of_environment_plays_the_same_episode(
        self, kind: type[CountEnv]
    ) -> None:
        env = kind(end=2)
        runner = EnvRunner(env)
        assert await runner.reset(7) == {"agent": ("seed 7", {"seed": 7})}
        assert runner.agent_ids == ("agent",)
        assert runner.active_agents == ("agent",)
        assert runner.suggested_sysprompt("agent") == "count, agent"
        assert runner.task_key() == "count to 2"
        assert await runner.step({"agent": "x"}) == {"agent": StepOutcome("x 1", 0.5)}
        assert not runner.done
        assert await runner.step({"agent": "y"}) == {
            "agent": StepOutcome("y 2", 0.5, terminated=True)
        }
        assert runner.done
        assert runner.active_agents == ()
        await runner.close()
        await runner.close()
        assert env.closed == 1

    @pytest.mark.parametrize(
        ("kind", "in_worker"), [(CountEnv, True), (DirectCountEnv, False), (AsyncCountEnv, False)]
    )
    async def test_only_blocking_environments_are_called_in_worker_threads(
        self, kind: type[CountEnv], in_worker: bool
    ) -> None:
        env = kind()
        runner = await after_reset(env)
        await runner.step({"agent": "x"})
        assert [name.startswith("ludic-env") for name in env.threads] == [in_worker] * 2
        await runner.close()

    async def test_a_slow_environment_does_not_block_the_event_loop(self) -> None:
        env = HangingEnv()
        runner = await after_reset(env)
        step = asyncio.create_task(runner.step({"agent": "x"}))
        await eventually(env.entered.is_set)
        ticks = 0
        for _ in range(10):
            await asyncio.sleep(0)
            ticks += 1
        assert (ticks, step.done()) == (10, False)
        env.release.set()
        assert (await step)["agent"].obs == "x 1"
        await runner.close()

    async def test_many_slow_environments_run_at_the_same_time(self) -> None:
        envs = [HangingEnv() for _ in range(50)]
        runners = [await after_reset(env) for env in envs]
        steps = [asyncio.create_task(runner.step({"agent": "x"})) for runner in runners]
        await eventually(lambda: all(env.entered.is_set() for env in envs))
        for env in envs:
            env.release.set()
        assert all(result["agent"].reward == 0.5 for result in await asyncio.gather(*steps))

    async def test_threads_are_used_again(self) -> None:
        threads = EnvThreads(max_threads=1)
        for _ in range(20):
            runner = EnvRunner(CountEnv(), threads=threads)
            await runner.reset(0)
            await runner.step({"agent": "x"})
            await runner.close()

    async def test_one_runner_plays_several_episodes(self) -> None:
        runner = EnvRunner(CountEnv(end=1))
        for seed in range(3):
            await runner.reset(seed)
            assert not runner.done
            await runner.step({"agent": "x"})
            assert runner.done
        await runner.close()

    async def test_an_environment_for_its_own_process_cannot_be_run_in_this_one(self) -> None:
        with pytest.raises(ConfigError, match="build_env"):
            EnvRunner(ProcessCountEnv())


class TestDeadlines:
    async def test_a_hung_thread_is_abandoned_counted_and_closed_when_it_comes_back(self) -> None:
        threads = EnvThreads()
        env = HangingEnv()
        runner = EnvRunner(env, threads=threads)
        await runner.reset(0)
        runner.step_timeout_s = 0.05
        with pytest.raises(DeadlineError, match="step 1 from environment HangingEnv"):
            await runner.step({"agent": "x"})
        assert threads.abandoned == 1
        with pytest.raises(EnvError, match="make a new one"):
            await runner.reset(1)
        await runner.close()
        assert env.closed == 0
        env.release.set()
        await eventually(lambda: threads.abandoned == 0)
        assert env.closed == 1

    async def test_too_many_hung_threads_stop_the_calling(self) -> None:
        threads = EnvThreads(max_abandoned=2)
        envs = [HangingEnv() for _ in range(3)]
        for env in envs:
            runner = EnvRunner(env, threads=threads)
            await runner.reset(0)
            runner.step_timeout_s = 0.05
            with pytest.raises(DeadlineError):
                await runner.step({"agent": "x"})
        with pytest.raises(EnvError, match=r"3 worker threads hang.*isolation"):
            await EnvRunner(CountEnv(), threads=threads).reset(0)
        for env in envs:
            env.release.set()
        await eventually(lambda: threads.abandoned == 0)
        await EnvRunner(CountEnv(), threads=threads).reset(0)

    async def test_more_calls_than_threads_are_refused(self) -> None:
        threads = EnvThreads(max_threads=1)
        env = HangingEnv()
        runner = EnvRunner(env, threads=threads)
        await runner.reset(0)
        step = asyncio.create_task(runner.step({"agent": "x"}))
        await eventually(env.entered.is_set)
        with pytest.raises(EnvError, match="lower the number of concurrent episodes"):
            await EnvRunner(CountEnv(), threads=threads).reset(0)
        env.release.set()
        await step

    async def test_cancelling_a_step_abandons_its_thread(self) -> None:
        threads = EnvThreads()
        env = HangingEnv()
        runner = EnvRunner(env, threads=threads)
        await runner.reset(0)
        step = asyncio.create_task(runner.step({"agent": "x"}))
        await eventually(env.entered.is_set)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert threads.abandoned == 1
        env.release.set()
        await eventually(lambda: threads.abandoned == 0)
        assert env.closed == 1

    @pytest.mark.parametrize("stubborn", [False, True])
    async def test_an_async_environment_is_cancelled_at_its_deadline(self, stubborn: bool) -> None:
        env = AsyncHangingEnv(stubborn=stubborn)
        runner = EnvRunner(env)
        await runner.reset(0)
        runner.step_timeout_s = 0.05
        with pytest.raises(DeadlineError, match="step 1"):
            await runner.step({"agent": "x"})
        assert env.cancelled == 1
        await runner.close()
        assert env.closed == 1

    async def test_after_a_deadline_the_runner_only_closes(self) -> None:
        runner = EnvRunner(AsyncHangingEnv(), step_timeout_s=60)
        await runner.reset(0)
        runner.step_timeout_s = 0.01
        with pytest.raises(DeadlineError):
            await runner.step({"agent": "x"})
        with pytest.raises(EnvError, match="make a new"):
            await runner.step({"agent": "x"})
        with pytest.raises(EnvError, match="make a new"):
            await runner.reset(0)
        await runner.close()


class TestRaising:
    @pytest.mark.parametrize("kind", [RaisingEnv, BlockingRaisingEnv, AsyncRaisingEnv])
    @pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3)])
    async def test_what_an_environment_raises_is_an_env_error_that_says_where(
        self, kind: type[RaisingEnv], error: BaseException
    ) -> None:
        env = kind("step", error)
        runner = await after_reset(env)
        with pytest.raises(EnvError) as caught:
            await runner.step({"agent": "x"})
        assert kind.__name__ in str(caught.value) or "sys.exit" in str(caught.value)
        await runner.close()
        assert env.closed == 1

    @pytest.mark.parametrize("kind", [RaisingEnv, BlockingRaisingEnv])
    async def test_a_failing_reset_says_so(self, kind: type[RaisingEnv]) -> None:
        runner = EnvRunner(kind("reset", ZeroDivisionError("oops")))
        with pytest.raises(EnvError, match="raised ZeroDivisionError in reset: oops"):
            await runner.reset(0)

    async def test_errors_of_configuration_keep_their_type(self) -> None:
        runner = EnvRunner(RaisingEnv("reset", ConfigError("no such file")))
        with pytest.raises(ConfigError, match="no such file"):
            await runner.reset(0)

    async def test_closing_never_raises(self) -> None:
        class Unclosable(DirectCountEnv):
            def close(self) -> None:
                raise OSError("busy")

        class Gone(DirectCountEnv):
            @property
            def close(self) -> Any:
                raise OSError("the other end is gone")

        for env in (Unclosable(), Gone()):
            await (await after_reset(env)).close()


class TestContract:
    @pytest.mark.parametrize(
        ("opening", "says"),
        [
            ({}, "reset returned nothing"),
            ([], "reset returned a list"),
            ({"c": ("", {})}, r"agent 'c'.*\['a', 'b'\]"),
            ({"a": "obs"}, "agent 'a' a str"),
            ({"a": ("obs",)}, "agent 'a' a tuple"),
            ({"a": (3, {})}, "agent 'a' an observation that is a int"),
            ({"a": ("", None)}, "agent 'a' an info that is None"),
        ],
    )
    async def test_a_broken_opening_is_refused(self, opening: Any, says: str) -> None:
        with pytest.raises(EnvError, match=f"environment AnyEnv: .*{says}"):
            await EnvRunner(AnyEnv(opening=opening)).reset(0)

    async def test_an_agent_named_twice_is_refused(self) -> None:
        class Twins(AnyEnv):
            @property
            def agent_ids(self) -> tuple[str, ...]:
                return ("a", "a")

        with pytest.raises(EnvError, match="names an agent twice"):
            await EnvRunner(Twins()).reset(0)

    @pytest.mark.parametrize(
        ("result", "says"),
        [
            (None, "step 1 returned None"),
            ([], "step 1 returned a list"),
            ({}, "no outcome for agent 'a', which acted"),
            ({"b": OK}, "no outcome for agent 'a', which acted"),
            ({"a": OK, "c": OK}, r"agent 'c', which is not one of its agents \['a', 'b'\]"),
            ({"a": 1.0}, "agent 'a' a float"),
            ({"a": OK, "b": None}, "agent 'b' None"),
            ({"a": StepOutcome("", float("nan"))}, "agent 'a' the reward nan"),
            ({"a": StepOutcome("", float("inf"))}, "agent 'a' the reward inf"),
            ({"a": StepOutcome("", np.float32("nan"))}, "agent 'a' the reward nan"),  # type: ignore[arg-type]
            ({"a": StepOutcome("", "1")}, "agent 'a' the reward '1', which is a str"),  # type: ignore[arg-type]
            ({"a": StepOutcome("", None)}, "agent 'a' the reward None"),  # type: ignore[arg-type]
            ({"a": StepOutcome("", 1j)}, "agent 'a' the reward 1j"),  # type: ignore[arg-type]
            ({"a": StepOutcome(None, 0.0)}, "agent 'a' an observation"),  # type: ignore[arg-type]
            ({"a": StepOutcome("", 0.0, terminated=1)}, "agent 'a' terminated=1"),  # type: ignore[arg-type]
            ({"a": StepOutcome("", 0.0, truncated="no")}, "truncated='no'"),  # type: ignore[arg-type]
            (
                {"a": StepOutcome("", 0.0, terminated=True, truncated=True)},
                "both terminated and truncated",
            ),
            ({"a": StepOutcome("", 0.0, info=[])}, "agent 'a' an info"),  # type: ignore[arg-type]
            ({"a": StepOutcome("", 0.0, info={"x": (1, 2)})}, "could not be stored"),
            (
                {"a": StepOutcome("", 0.0, reward_components={"x": float("nan")})},
                "reward component 'x' nan",
            ),
            ({"a": StepOutcome("", 0.0, reward_components=[1.0])}, "reward_components"),  # type: ignore[arg-type]
        ],
    )
    async def test_a_broken_outcome_is_refused(self, result: Any, says: str) -> None:
        runner = await after_reset(AnyEnv(steps=[result]))
        with pytest.raises(EnvError, match=f"environment AnyEnv: .*{says}"):
            await runner.step({"a": "x"})
        with pytest.raises(EnvError, match="was failed"):
            await runner.step({"a": "x"})

    async def test_an_action_that_was_taken_out_of_the_mapping_still_needs_an_outcome(self) -> None:
        class Popping(AnyEnv):
            def step(self, actions: Any) -> Any:
                actions.popitem()
                return {}

        given = {"a": "x"}
        runner = await after_reset(Popping())
        with pytest.raises(EnvError, match="no outcome for agent 'a', which acted"):
            await runner.step(given)
        assert given == {"a": "x"}

    async def test_numbers_of_numpy_become_plain_ones(self) -> None:
        outcome = StepOutcome(
            "",
            np.float32(0.5),  # type: ignore[arg-type]
            terminated=np.True_,  # type: ignore[arg-type]
            reward_components={"x": np.int64(2)},  # type: ignore[dict-item]
        )
        runner = await after_reset(AnyEnv(steps=[{"a": outcome}]))
        got = (await runner.step({"a": "x"}))["a"]
        assert got == StepOutcome("", 0.5, terminated=True, reward_components={"x": 2.0})
        assert type(got.reward) is float
        assert got.terminated is True
        assert type(got.reward_components["x"]) is float

    @given(st.floats())
    def test_a_reward_comes_through_as_it_was_or_not_at_all(self, reward: float) -> None:
        async def run() -> None:
            runner = await after_reset(AnyEnv(steps=[{"a": StepOutcome("", reward)}]))
            if abs(reward) <= 1e300:
                assert (await runner.step({"a": "x"}))["a"].reward == reward
            else:
                with pytest.raises(EnvError):
                    await runner.step({"a": "x"})

        asyncio.run(run())

    async def test_a_reward_that_two_of_would_be_infinite_is_refused(self) -> None:
        runner = await after_reset(AnyEnv(steps=[{"a": StepOutcome("", 1e308)}]))
        with pytest.raises(EnvError, match=r"the reward 1e\+308; the sum .* scale them down"):
            await runner.step({"a": "x"})

    async def test_everybody_hears_their_own_ending(self) -> None:
        lost = structs.replace(OVER, reward=-1.0)
        runner = await after_reset(AnyEnv(steps=[{"a": OVER, "b": lost}]))
        assert await runner.step({"a": "x"}) == {"a": OVER, "b": lost}
        assert runner.done

    async def test_nobody_acts_after_the_end(self) -> None:
        runner = await after_reset(AnyEnv(steps=[{"a": OVER, "b": OVER}, {"a": OK}]))
        await runner.step({"a": "x"})
        with pytest.raises(EnvError, match=r"out of turn \['a'\]"):
            await runner.step({"a": "x"})

    async def test_an_ended_agent_hears_no_second_outcome(self) -> None:
        runner = await after_reset(
            AnyEnv(
                steps=[{"a": OK, "b": OVER}, {"a": OK, "b": OK}],
            )
        )
        await runner.step({"a": "x"})
        with pytest.raises(EnvError, match="outcome for agent 'b', whose episode had ended"):
            await runner.step({"a": "x"})

    async def test_an_ended_agent_cannot_be_active(self) -> None:
        runner = await after_reset(AnyEnv(steps=[{"a": OVER}]))
        await runner.step({"a": "x"})
        with pytest.raises(EnvError, match="active_agents names agent 'a', which has ended"):
            _ = runner.active_agents

    async def test_somebody_must_be_active_until_the_end(self) -> None:
        env = AnyEnv(steps=[{"a": OVER}], active=lambda step: () if step else ("a",))
        runner = await after_reset(env)
        await runner.step({"a": "x"})
        with pytest.raises(EnvError, match=r"has not ended for \['b'\]"):
            _ = runner.active_agents

    async def test_an_unknown_active_agent_is_refused(self) -> None:
        runner = await after_reset(AnyEnv(active=lambda step: ("z",)))
        with pytest.raises(EnvError, match="'z'"):
            _ = runner.active_agents

    async def test_an_agent_that_is_active_twice_is_refused(self) -> None:
        runner = await after_reset(AnyEnv(active=lambda step: ("a", "a")))
        with pytest.raises(EnvError, match=r"names an agent twice: \['a', 'a'\]"):
            _ = runner.active_agents

    async def test_active_agents_that_raise_are_said_with_the_environment(self) -> None:
        runner = await after_reset(AnyEnv(active=lambda step: [][step]))
        with pytest.raises(EnvError, match="AnyEnv raised IndexError in active_agents"):
            _ = runner.active_agents

    @pytest.mark.parametrize(
        ("actions", "says"),
        [
            ({}, r"missing \['a', 'b'\]"),
            ({"a": "x"}, r"missing \['b'\]"),
            ({"a": "x", "b": "y", "c": "z"}, r"out of turn \['c'\]"),
            ({"a": "x", "b": None}, "actions are text"),
        ],
    )
    async def test_wrong_actions_are_refused(self, actions: Any, says: str) -> None:
        runner = await after_reset(AnyEnv(active=lambda step: ("a", "b")))
        with pytest.raises(EnvError, match=says):
            await runner.step(actions)

    async def test_an_action_out_of_turn_is_refused(self) -> None:
        runner = await after_reset(AnyEnv())
        with pytest.raises(EnvError, match=r"out of turn \['b'\]"):
            await runner.step({"a": "x", "b": "y"})

    async def test_some_environments_take_the_actions_of_some(self) -> None:
        env = PartialEnv(steps=[{"b": OK}], active=lambda step: ("a", "b"))
        runner = await after_reset(env)
        assert runner.accepts_partial_actions
        assert await runner.step({"b": "y"}) == {"b": OK}
        with pytest.raises(EnvError, match="missing"):
            await runner.step({})

    async def test_stepping_before_a_reset_is_refused(self) -> None:
        with pytest.raises(EnvError, match="call reset first"):
            await EnvRunner(AnyEnv()).step({"a": "x"})
