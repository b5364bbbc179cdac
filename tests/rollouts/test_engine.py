from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ludic.errors import ConfigError, ProtocolError, RolloutError, UnknownNameError
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.scripted_client import ScriptedCall
from ludic.rollouts import (
    Budget,
    EnvSpec,
    GRPORequestStrategy,
    Progress,
    ProtocolSpec,
    RolloutEngine,
    RolloutRequest,
    RolloutWriter,
    read_rollouts,
)
from ludic.saw.building import CreditAssigner
from ludic.training.credit_assignment.returns import GroupNormalizedReturn
from ludic.types import AgentStep, Rollout
from tests.rollouts.worlds import (
    ENVS,
    PLAIN,
    DuelEnv,
    GuessEnv,
    engine,
    protocols,
    request,
    runtime,
)


class Credit:
    """An algorithm with nothing but credit."""

    def __init__(self, credit_assigner: CreditAssigner) -> None:
        self.credit_assigner = credit_assigner


async def slow_where_the_seed_is_odd(call: ScriptedCall) -> str:
    seed = call.request.sampling.seed or 0
    await asyncio.sleep(0.01 * (seed % 3))
    return str(Random(seed).randrange(4))


async def test_rollouts_come_in_the_order_of_the_requests_at_any_concurrency() -> None:
    asked = [request(num_episodes=4), request("duel", num_episodes=2), request(num_episodes=2)]
    runs = [
        await engine(slow_where_the_seed_is_odd).generate_rollouts(asked, 5, concurrency)
        for concurrency in (1, 3, 16)
    ]
    assert runs[0] == runs[1] == runs[2]
    assert [r.episode_id for r in runs[0]] == [
        f"call-0/{i}/{e}"
        for i, n, agents in ((0, 4, 1), (1, 2, 2), (2, 2, 1))
        for e in range(n)
        for _ in range(agents)
    ]
    assert len({r.id for r in runs[0]}) == len(runs[0])


async def test_a_rollout_says_where_it_comes_from() -> None:
    asked = request(
        env_seed=5,
        sampling_seed=6,
        kwargs={"tries": 2},
        meta={"level": 3},
        inference=InferenceSpec(SamplingConfig(temperature=0.5)),
    )
    [rollout] = await engine().generate_rollouts([asked], 4, 1)
    assert rollout.env == EnvSpec("guess", {"tries": 2})
    assert rollout.protocol == asked.protocol
    assert (rollout.env_seed, rollout.sampling_seed) == (5, 6)
    assert rollout.task_key == f"guess-{Random(5).randrange(4)}"
    assert rollout.meta["level"] == 3
    assert rollout.meta["max_steps"] == 4
    assert rollout.agent_steps[0].sampling["temperature"] == 0.5
    [named] = await engine().generate_rollouts([request(task_key="mine")], 4, 1)
    assert named.task_key == "mine"


class DeckEnv(GuessEnv):
    """Shuffles the list that it was given."""

    def __init__(self, cards: list[str]) -> None:
        super().__init__(tries=1)
        self.cards = cards

    def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        super().env_reset(seed=seed)
        Random(seed).shuffle(self.cards)
        return " ".join(self.cards), {}


async def test_an_environment_that_shuffles_its_argument_has_one_task_for_a_group() -> None:
    deck = {"cards": list("abcdef")}
    asked = GRPORequestStrategy(4).expand([request("deck", kwargs=deck)])
    rollouts = await engine(envs={"deck": DeckEnv}).generate_rollouts(asked)
    assert len({r.env_steps[0].obs for r in rollouts}) == 1
    assert deck == {"cards": list("abcdef")}


async def test_no_more_episodes_run_at_a_time_than_asked_for() -> None:
    running = most = 0

    async def policy(call: ScriptedCall) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return "0"

    await engine(policy).generate_rollouts([request(num_episodes=12)], 2, 3)
    assert most == 3


async def test_the_stream_gives_rollouts_as_they_finish() -> None:
    async def policy(call: ScriptedCall) -> str:
        slow = "call-0/0/" in (call.request.conversation_id or "")
        await asyncio.sleep(0.1 if slow else 0.0)
        return "0"

    stream = engine(policy).stream_rollouts([request(), request(), request()], 1, 3)
    order = [rollout.episode_id async for rollout in stream]
    assert order[-1] == "call-0/0/0"
    assert sorted(order) == ["call-0/0/0", "call-0/1/0", "call-0/2/0"]


async def test_a_failing_episode_costs_itself_only() -> None:
    asked = [request(num_episodes=3), request("broken"), request(num_episodes=3)]
    rollouts = await engine().generate_rollouts(asked, 3, 4)
    assert len(rollouts) == 7
    failed = [r for r in rollouts if r.error is not None]
    assert [r.episode_id for r in failed] == ["call-0/1/0"]
    assert "fell off the table" in str(failed[0].error)


async def test_a_factory_that_raises_costs_one_episode() -> None:
    def no_env() -> GuessEnv:
        raise OSError("no such dataset")

    rollouts = await engine(envs={"none": no_env}).generate_rollouts([request("none"), request()])
    assert str(rollouts[0].error).startswith("OSError: no such dataset (")
    assert rollouts[0].steps == ()
    assert rollouts[1].error is None


async def test_a_hanging_environment_ends_at_its_deadline() -> None:
    asked = [request("hanging"), request()]
    rollouts = await engine(step_timeout_s=0.1).generate_rollouts(asked, 2, 2)
    assert "DeadlineError" in str(rollouts[0].error)
    assert rollouts[1].error is None


async def test_a_slow_episode_ends_at_its_deadline() -> None:
    async def policy(call: ScriptedCall) -> str:
        await asyncio.sleep(5.0)
        return "0"

    [rollout] = await engine(policy, episode_timeout_s=0.05).generate_rollouts([request()])
    assert "DeadlineError" in str(rollout.error)


async def test_too_many_failures_stop_the_call_with_their_causes() -> None:
    with pytest.raises(RolloutError, match=r"max_failure_rate=0.5") as caught:
        await engine().generate_rollouts([request("broken", num_episodes=40)], 3, 4)
    assert "fell off the table" in str(caught.value)


async def test_the_failure_rate_is_that_of_the_run_and_not_of_one_call() -> None:
    running = engine(max_failure_rate=0.25)
    for _ in range(2):
        await running.generate_rollouts([request("broken")], 3, 1)
    with pytest.raises(RolloutError):
        await running.generate_rollouts([request("broken")], 3, 1)


async def test_an_unknown_name_ends_the_call_at_once() -> None:
    with pytest.raises(UnknownNameError, match="guess"):
        await engine().generate_rollouts([request("gues")])
    with pytest.raises(UnknownNameError, match="single_agent"):
        await engine().generate_rollouts([request(protocol=ProtocolSpec("single"))])


async def test_a_protocol_that_does_not_fit_the_environment_ends_the_call_at_once() -> None:
    made: list[DuelEnv] = []

    def duel() -> DuelEnv:
        made.append(DuelEnv())
        return made[-1]

    with pytest.raises(ProtocolError, match="MultiAgentProtocol"):
        await engine(envs={"duel": duel}).generate_rollouts([request("duel", protocol=PLAIN)])
    assert made[0].closed


async def test_a_protocol_by_name_needs_a_runtime() -> None:
    with pytest.raises(ConfigError, match="runtime"):
        await RolloutEngine(ENVS).generate_rollouts([request()])
    no_runtime = RolloutEngine(ENVS, protocols())
    with pytest.raises(ConfigError, match="runtime"):
        await no_runtime.generate_rollouts([request(inference=InferenceSpec())])


async def test_the_global_registry_is_used_where_none_is_given() -> None:
    asked = RolloutRequest(
        EnvSpec("tic_tac_toe"), ProtocolSpec("single_agent", {"parser": "text"}), num_episodes=2
    )
    rollouts = await RolloutEngine(runtime=runtime(lambda call: "B2")).generate_rollouts([asked])
    assert [r.error for r in rollouts] == [None, None]


async def test_an_environment_is_closed_when_its_protocol_cannot_be_made() -> None:
    made: list[GuessEnv] = []

    def env() -> GuessEnv:
        made.append(GuessEnv())
        return made[-1]

    def no_protocol(runtime: object) -> None:
        raise ValueError("no")

    broken = RolloutEngine({"guess": env}, {"single_agent": no_protocol})  # type: ignore[dict-item]
    [rollout] = await broken.generate_rollouts(
        [request(protocol=ProtocolSpec("single_agent"))], 1, 1
    )
    assert str(rollout.error).startswith("ValueError: no (")
    assert made[0].closed


async def test_cancelling_stops_the_episodes_and_closes_their_environments() -> None:
    made: list[GuessEnv] = []
    waiting = asyncio.Event()

    def env() -> GuessEnv:
        made.append(GuessEnv())
        return made[-1]

    async def policy(call: ScriptedCall) -> str:
        waiting.set()
        await asyncio.sleep(60)
        return "0"

    running = engine(policy, envs={"guess": env})
    task = asyncio.create_task(running.generate_rollouts([request(num_episodes=6)], 2, 2))
    await asyncio.wait_for(waiting.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 1 <= len(made) <= 2
    # One that was being made in its thread is closed when that is done.
    deadline = time.monotonic() + 30
    while not all(e.closed for e in made):
        assert time.monotonic() < deadline, "an environment stays open"
        await asyncio.sleep(0.01)


async def test_closing_the_stream_stops_what_is_running() -> None:
    started = 0

    async def policy(call: ScriptedCall) -> str:
        nonlocal started
        started += 1
        await asyncio.sleep(0.001)
        return "0"

    stream = engine(policy).stream_rollouts([request(num_episodes=200)], 1, 2)
    async with aclosing(stream):
        async for _ in stream:
            break
    seen = started
    await asyncio.sleep(0.02)
    assert started == seen < 20


async def test_a_lost_member_is_run_again_where_the_policy_says_so() -> None:
    failures = 0

    def fails_at_first(call: ScriptedCall) -> BaseException | None:
        nonlocal failures
        if "call-0/1/" in (call.request.conversation_id or "") and failures < 2:
            failures += 1
            return ConnectionError("the backend went away")
        return None

    asked = GRPORequestStrategy(3).expand([request(env_seed=1)])
    running = engine(fault=fails_at_first, lost_member="retry", max_retries=2)
    rollouts = await running.generate_rollouts(asked, 3, 4)
    assert [r.error for r in rollouts] == [None] * 3
    assert rollouts[1].meta["attempt"] == 2
    assert len(rollouts[1].meta["earlier_errors"]) == 2
    assert len({r.sampling_seed for r in rollouts}) == 3
    assert len({r.env_seed for r in rollouts}) == 1


async def test_a_batch_without_a_broken_group() -> None:
    def fault(call: ScriptedCall) -> BaseException | None:
        return ConnectionError("gone") if "call-0/1/" in str(call.request.conversation_id) else None

    asked = GRPORequestStrategy(2).expand([request(env_seed=1), request(env_seed=2)])
    batch = await engine(fault=fault).generate_batch(
        asked, Credit(GroupNormalizedReturn(2)), max_steps=3
    )
    assert {i.group_id for i in batch.items} == {"group-1/agent"}
    assert batch.meta["failed_episodes"] == 1
    assert batch.meta["dropped"]["group_lost_member"] >= 1


async def test_environments_can_be_mixed_in_one_batch() -> None:
    asked = GRPORequestStrategy(2).expand([request(), request("duel")])
    batch = await engine().generate_batch(asked, Credit(GroupNormalizedReturn(2)), max_steps=3)
    assert {i.group_id for i in batch.items} == {
        "group-0/agent",
        "group-1/first",
        "group-1/second",
    }
    assert {i.meta["env"] for i in batch.items} == {"guess", "duel"}


async def test_an_episode_budget_starts_whole_groups_only() -> None:
    asked = GRPORequestStrategy(3).expand([request(), request(), request()])
    seen: list[Progress] = []
    rollouts = await engine().generate_rollouts(
        asked, 3, 2, budget=Budget(max_episodes=7), on_progress=seen.append
    )
    assert {r.group_id for r in rollouts} == {"group-0", "group-1"}
    assert len(rollouts) == 6
    assert seen[-1].not_started == 3


async def test_a_token_budget_lets_what_began_finish() -> None:
    rollouts = await engine().generate_rollouts(
        [request(num_episodes=50)], 3, 1, budget=Budget(max_tokens=10)
    )
    spent = [r.num_tokens for r in rollouts]
    assert sum(spent) >= 10 > sum(spent[:-1])
    assert all(r.terminated or r.truncated for r in rollouts)


@pytest.mark.parametrize("limit", [{"max_tokens": 0}, {"max_episodes": -1}])
def test_a_budget_of_nothing_is_refused(limit: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Budget(**limit)


async def test_progress_counts_episodes_tokens_and_causes() -> None:
    seen: list[Progress] = []
    rollouts = await engine().generate_rollouts(
        [request(num_episodes=3), request("broken")], 3, 2, on_progress=seen.append
    )
    assert [p.finished for p in seen] == [0, 1, 2, 3, 4]
    assert seen[-1].total == 4
    assert seen[-1].tokens == sum(r.num_tokens for r in rollouts)
    assert sum(seen[-1].failed.values()) == 1


async def test_every_rollout_is_written_as_it_finishes(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl.zst"
    found: list[Rollout] = []
    with RolloutWriter(path) as writer:
        stream = engine(writer=writer).stream_rollouts([request(num_episodes=4)], 3, 2)
        async for rollout in stream:
            found.append(rollout)
            await writer.flush_async()
            assert rollout in list(read_rollouts(path))
    assert sorted(r.id for r in read_rollouts(path)) == sorted(r.id for r in found)


async def test_a_prompt_that_no_longer_fits_is_an_ending_and_no_failure() -> None:
    running = engine(lambda call: "9", max_context_tokens=110)
    [rollout] = await running.generate_rollouts([request(kwargs={"tries": 50})], 50, 1)
    assert rollout.error is None
    assert rollout.truncation_reason == "context_window"
    assert any(isinstance(s, AgentStep) for s in rollout.steps)


@pytest.mark.parametrize("setting", [{"max_steps": 0}, {"concurrency": 0}])
async def test_settings_below_one_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        await engine().generate_rollouts([request()], **setting)


def test_an_unknown_policy_for_lost_members_is_refused() -> None:
    with pytest.raises(ConfigError, match="lost_member"):
        engine(lost_member="ignore")
