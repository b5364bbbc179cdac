from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ludic.errors import CheckpointError, ConfigError, RolloutError
from ludic.inference.scripted_client import ScriptedCall
from ludic.rollouts import (
    Budget,
    FixedMix,
    GRPORequestStrategy,
    IdentityStrategy,
    RolloutRequest,
    RolloutWriter,
    TargetSolveRate,
    read_rollouts,
)
from ludic.saw import CreditAssigner, SAWBatch, drop_if
from ludic.training.algorithm import RLAlgorithm
from ludic.training.algorithms.reinforce import ReinforceLoss
from ludic.training.batching import DynamicSampling, RolloutBatchSource
from ludic.training.credit_assignment.returns import GroupNormalizedReturn, MonteCarloReturn
from tests.rollouts.worlds import engine, random_digit, request


def assigning(credit: CreditAssigner) -> RLAlgorithm:
    """An algorithm of which only the credit matters."""
    return RLAlgorithm("test", credit, ReinforceLoss())


def grouped(size: int = 2) -> RLAlgorithm:
    return assigning(GroupNormalizedReturn(size))


def source(**options: Any) -> RolloutBatchSource:
    defaults: dict[str, Any] = {
        "engine": engine(),
        "request_fn": lambda: [request(num_episodes=2)],
        "algorithm": assigning(MonteCarloReturn()),
        "max_steps": 3,
    }
    return RolloutBatchSource(**{**defaults, **options})


def ids(batch: SAWBatch) -> list[str]:
    return [item.rollout_id for item in batch.items]


async def test_batches_follow_each_other_with_ids_and_seeds_of_their_own() -> None:
    running = source()
    first, second = await running.next_batch(), await running.next_batch()
    assert ids(first) == ["step-0/0/0/agent", "step-0/0/1/agent"]
    assert ids(second) == ["step-1/0/0/agent", "step-1/0/1/agent"]
    again = await source().next_batch()
    assert [i.input_ids.tolist() for i in again.items] == [
        i.input_ids.tolist() for i in first.items
    ]


async def test_the_request_function_is_given_the_step_if_it_takes_one() -> None:
    asked: list[int] = []

    def by_step(step: int) -> list[RolloutRequest]:
        asked.append(step)
        return [request(env_seed=step)]

    running = source(request_fn=by_step)
    for _ in range(3):
        await running.next_batch()
    assert asked == [0, 1, 2]


async def test_the_request_function_may_be_asynchronous() -> None:
    async def later() -> list[RolloutRequest]:
        return [request()]

    assert len((await source(request_fn=later).next_batch()).items) == 1


async def test_requests_become_groups_of_the_size_that_the_algorithm_compares() -> None:
    batch = await source(algorithm=grouped(3)).next_batch()
    assert batch.counts.rollouts == 6
    assert {i.group_id for i in batch.items} == {
        "step-0/group-0-0/agent",
        "step-0/group-0-1/agent",
    }


async def test_requests_that_come_in_groups_stay_in_them() -> None:
    ready = GRPORequestStrategy(2).expand([request()])
    batch = await source(algorithm=grouped(2), request_fn=lambda: ready).next_batch()
    assert batch.counts.rollouts == 2


@pytest.mark.parametrize("number", [0, 6, 9])
def test_a_number_of_rollouts_that_is_no_multiple_of_the_group_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=rf"rollouts_per_update={number} .*group_size=4"):
        source(algorithm=grouped(4), rollouts_per_update=number)


def test_a_strategy_of_another_group_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"groups of 3.*groups of 4"):
        source(algorithm=grouped(4), request_strategy=GRPORequestStrategy(3))
    source(algorithm=grouped(4), request_strategy=IdentityStrategy())


async def test_requests_must_come_to_the_stated_number() -> None:
    running = source(algorithm=grouped(2), rollouts_per_update=8)
    with pytest.raises(ConfigError, match=r"4 episodes.*rollouts_per_update=8"):
        await running.next_batch()


def test_a_request_function_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither"):
        source(request_fn=3)
    with pytest.raises(ConfigError, match="rollouts_per_update"):
        source(request_fn=FixedMix({"a": (request(), 1.0)}))


async def test_a_request_function_that_gives_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no requests for step 0"):
        await source(request_fn=lambda: []).next_batch()


async def test_a_curriculum_is_asked_for_groups_and_told_the_outcomes() -> None:
    tasks = TargetSolveRate({"a": request(env_seed=1), "b": request(env_seed=2)})
    running = source(request_fn=tasks, algorithm=grouped(2), rollouts_per_update=4)
    batch = await running.next_batch()
    assert batch.counts.rollouts == 4
    assert batch.counts.groups == 2
    assert tasks.solve_rates != {"a": 0.5, "b": 0.5}
    assert {i.meta["curriculum"] for i in batch.items} <= {"a", "b"}


async def test_a_resumed_source_goes_on_as_if_it_had_not_stopped() -> None:
    def make() -> RolloutBatchSource:
        return source(
            request_fn=TargetSolveRate({"a": request(env_seed=1), "b": request()}),
            rollouts_per_update=3,
        )

    whole = make()
    await whole.next_batch()
    await whole.next_batch()
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(2):
        a, b = await whole.next_batch(), await resumed.next_batch()
        assert ids(a) == ids(b)
        assert [i.input_ids.tolist() for i in a.items] == [i.input_ids.tolist() for i in b.items]
    assert whole.state_dict() == resumed.state_dict()


def test_a_state_from_when_sources_saved_the_algorithm_too_is_still_read() -> None:
    running = source()
    old = {"step": 3, "episodes": 6, "tokens": 9, "requests": None, "algorithm": {"name": "test"}}
    running.load_state_dict(old)
    assert running.step == 3


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not the state"):
        source().load_state_dict({"step": 1})
    with pytest.raises(CheckpointError, match="do not match"):
        source().load_state_dict({"step": 1, "episodes": 1, "tokens": 1, "requests": {"given": {}}})


async def test_groups_without_variance_are_sampled_again() -> None:
    rounds: list[int] = []

    def policy(call: ScriptedCall) -> str:
        # The first group of the first round always fails alike; all others differ.
        name = str(call.request.conversation_id)
        if name.startswith(("step-0/0/", "step-0/1/")):
            return "9"
        return str(Random(call.request.sampling.seed).randrange(4))

    def asks(step: int) -> list[RolloutRequest]:
        rounds.append(step)
        return [
            request(env_seed=11, kwargs={"tries": 1}),
            request(env_seed=12, kwargs={"tries": 1}),
        ]

    running = source(
        engine=engine(policy),
        request_fn=asks,
        algorithm=grouped(2),
        resample=DynamicSampling(max_rounds=12),
    )
    batch = await running.next_batch()
    assert batch.counts.groups == 2
    assert batch.meta["dropped"]["no_variance"] >= 2
    assert batch.meta["sampling_rounds"] == len(rounds) > 1
    assert rounds == list(range(len(rounds)))  # never the same step, hence never the same prompts
    assert all(i.weight != 0.0 for i in batch.items)
    assert batch.meta["rollouts_sampled"] > batch.counts.rollouts
    assert running.step == 1
    resumed = source(
        engine=engine(policy),
        request_fn=asks,
        algorithm=grouped(2),
        resample=DynamicSampling(max_rounds=12),
    )
    resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
    await resumed.next_batch()
    assert rounds == list(range(len(rounds)))


async def test_resampling_stops_after_its_rounds() -> None:
    running = source(
        engine=engine(lambda call: "9"),
        algorithm=grouped(2),
        resample=DynamicSampling(max_rounds=2),
        max_empty_batches=2,
    )
    with pytest.raises(RolloutError, match=r"2 batches in a row.*'no_variance'"):
        await running.next_batch()


def test_resampling_needs_groups() -> None:
    with pytest.raises(ConfigError, match="needs groups"):
        source(resample=DynamicSampling())
    with pytest.raises(ConfigError, match="max_rounds"):
        DynamicSampling(0)


async def test_batches_that_turn_out_empty_are_passed_over_and_counted() -> None:
    def judge(step: int) -> Any:
        return drop_if("early", lambda s: s.rollout.id.startswith(f"step-{step}"))

    running = source(sample_filter=judge(0))
    batch = await running.next_batch()
    assert ids(batch)[0].startswith("step-1/")
    assert batch.meta["dropped"]["early"] >= 2
    assert running.step == 2


async def test_the_run_ends_cleanly_when_the_episodes_are_spent() -> None:
    running = source(
        algorithm=grouped(2),
        request_fn=lambda: [request(), request()],
        budget=Budget(max_episodes=7),
    )
    sizes = [(await running.next_batch()).counts.rollouts for _ in range(2)]
    assert sizes == [4, 2]
    with pytest.raises(StopAsyncIteration):
        await running.next_batch()


async def test_the_run_ends_cleanly_when_the_tokens_are_spent() -> None:
    running = source(budget=Budget(max_tokens=1))
    await running.next_batch()
    with pytest.raises(StopAsyncIteration, match="max_tokens=1"):
        await running.next_batch()
    resumed = source(budget=Budget(max_tokens=1))
    resumed.load_state_dict(running.state_dict())
    with pytest.raises(StopAsyncIteration):
        await resumed.next_batch()


async def test_rollouts_are_written_on_the_way(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    with RolloutWriter(path) as writer:
        await source(writer=writer).next_batch()
    assert sorted(r.id for r in read_rollouts(path)) == ["step-0/0/0/agent", "step-0/0/1/agent"]


@pytest.mark.parametrize("whose", ["source", "engine"])
async def test_the_record_is_flushed_wherever_the_writer_is(tmp_path: Path, whose: str) -> None:
    path = tmp_path / "r.jsonl.zst"
    async with RolloutWriter(path) as writer:
        running = source(writer=writer) if whose == "source" else source()
        running.engine.writer = writer if whose == "engine" else None
        await running.next_batch()
        await running.flush_record()
        assert len(list(read_rollouts(path))) == 2


async def test_a_writer_that_holds_nothing_back_needs_no_flush() -> None:
    class Kept(list[Any]):
        write = list.append

    kept = Kept()
    running = source(writer=kept)
    await running.next_batch()
    await running.flush_record()
    assert len(kept) == 2


async def test_the_policy_is_followed_when_a_member_is_lost() -> None:
    def fault(call: ScriptedCall) -> BaseException | None:
        lost = "step-0/0/" in str(call.request.conversation_id)
        return ConnectionError("gone") if lost else None

    def run(policy: str, credit: Any) -> RolloutBatchSource:
        return source(
            engine=engine(random_digit, fault=fault, lost_member=policy),
            request_fn=lambda: [request(), request()],
            algorithm=assigning(credit),
        )

    dropped = await run("drop_group", GroupNormalizedReturn(2)).next_batch()
    assert dropped.counts.rollouts == 2
    kept = await run("keep_partial", GroupNormalizedReturn(2, allow_partial=True)).next_batch()
    assert kept.counts.rollouts == 3


def test_the_seeds_paths_lead_here() -> None:
    from ludic.rollouts.engine import RolloutEngine
    from ludic.training.batching.rollout_batch_source import RolloutBatchSource as FromFile
    from ludic.training.batching.rollout_engine import RolloutEngine as FromSeeds
    from ludic.training.filters import combine, drop_truncated

    assert FromSeeds is RolloutEngine
    assert FromFile is RolloutBatchSource
    assert callable(combine(drop_truncated()))
