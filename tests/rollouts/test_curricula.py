from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ludic.errors import CheckpointError, ConfigError
from ludic.rollouts import (
    Curriculum,
    EnvSpec,
    FixedMix,
    ProtocolSpec,
    RolloutRequest,
    Stage,
    Stages,
    TargetSolveRate,
)
from ludic.seeding import derive_seed
from ludic.types import EnvironmentStep, Rollout

ASK = RolloutRequest(EnvSpec("e"), ProtocolSpec("p"))


def outcome(request: RolloutRequest, reward: float, error: str | None = None) -> Rollout:
    step = EnvironmentStep(0, (), "o", "a", "n", reward)
    return Rollout("r", (step,), meta=request.meta, error=error, episode_id=str(id(request)))


def names(requests: list[RolloutRequest]) -> Counter[str]:
    return Counter(r.meta["curriculum"] for r in requests)


def pair() -> FixedMix:
    return FixedMix({"a": (ASK, 1.0), "b": (ASK, 3.0)})


@given(st.lists(st.integers(0, 9), max_size=6))
def test_a_fixed_mix_keeps_its_proportions_over_batches_of_any_size(sizes: list[int]) -> None:
    mix = pair()
    given_out = [r for n in sizes for r in mix.next_requests(n)]
    assert abs(names(given_out)["a"] - 0.25 * len(given_out)) < 1


def test_requests_of_a_mix_have_seeds_of_their_own_unless_the_template_has_one() -> None:
    fresh = FixedMix({"a": (ASK, 1.0), "b": (ASK, 1.0)}).next_requests(20)
    assert len({r.env_seed for r in fresh}) == len({r.sampling_seed for r in fresh}) == 20
    fixed = FixedMix({"a": (replace(ASK, env_seed=7), 1.0)}).next_requests(3)
    assert {r.env_seed for r in fixed} == {7}
    # As in runs before, which are resumed and repeated.
    assert [r.sampling_seed for r in fixed] == [
        derive_seed(0, "a", "sampling", n) for n in (0, 1, 2)
    ]


def test_stages_go_on_after_a_number_of_episodes_or_at_a_solve_rate() -> None:
    stages = Stages(
        [
            Stage(FixedMix({"easy": (ASK, 1.0)}), episodes=3),
            Stage(FixedMix({"middle": (ASK, 1.0)}), solve_rate=0.75, window=4),
            Stage(FixedMix({"hard": (ASK, 1.0)})),
        ]
    )
    stages.report([outcome(r, 0.0) for r in stages.next_requests(3)])
    assert stages.stage == 1
    for rewards in ((1.0, 0.0), (0.0, 1.0), (1.0, 0.0)):
        asked = stages.next_requests(2)
        assert names(asked) == {"middle": 2}
        stages.report([outcome(r, w) for r, w in zip(asked, rewards, strict=True)])
        assert stages.stage == 1
    stages.report([outcome(r, 1.0) for r in stages.next_requests(3)])
    assert stages.stage == 2
    assert names(stages.next_requests(2)) == {"hard": 2}
    stages.report([outcome(r, 1.0) for r in stages.next_requests(200)])
    assert stages.stage == 2


def test_failed_episodes_and_those_of_an_earlier_stage_do_not_end_a_stage() -> None:
    first, second = (FixedMix({n: (ASK, 1.0)}) for n in "ab")
    stages = Stages([Stage(first, episodes=1), Stage(second, episodes=2), Stage(second)])
    late = stages.next_requests(4)
    stages.report([outcome(late[0], 0.0, error="boom")])
    assert stages.stage == 0
    stages.report([outcome(late[1], 0.0)])
    stages.report([outcome(r, 0.0) for r in late[2:]])
    assert stages.stage == 1


def test_tasks_near_the_target_are_drawn_more_often() -> None:
    tasks = TargetSolveRate(dict.fromkeys(("easy", "right", "hopeless"), ASK), learning_rate=0.5)
    label = {n: replace(ASK, meta={"curriculum": n}) for n in ("easy", "right", "hopeless")}
    for round_number in range(20):
        tasks.report([outcome(label["easy"], 1.0), outcome(label["hopeless"], 0.0)])
        tasks.report([outcome(label["right"], float(round_number % 2))])
    assert tasks.solve_rates["easy"] > 0.99
    assert tasks.solve_rates["hopeless"] < 0.01
    chances = tasks.probabilities()
    assert sum(chances.values()) == pytest.approx(1.0)
    assert chances["right"] > 3 * chances["easy"] > 0
    drawn = names(tasks.next_requests(300))
    assert drawn["right"] > drawn["easy"] + drawn["hopeless"]
    assert min(drawn["easy"], drawn["hopeless"]) > 0


def test_failed_episodes_say_nothing_about_a_task() -> None:
    tasks = TargetSolveRate({"a": ASK})
    asked = tasks.next_requests(1)
    tasks.report([outcome(asked[0], 0.0, error="boom")])
    assert tasks.solve_rates == {"a": 0.5}


CURRICULA: list[Any] = [
    pair,
    lambda: TargetSolveRate({"a": ASK, "b": ASK}),
    lambda: Stages([Stage(pair(), episodes=5), Stage(pair())]),
]


@pytest.mark.parametrize("make", CURRICULA)
def test_a_curriculum_goes_on_from_its_saved_state(make: Any) -> None:
    whole: Curriculum = make()
    assert isinstance(whole, Curriculum)
    for reward in (1.0, 0.0):
        whole.report([outcome(r, reward) for r in whole.next_requests(4)])
    resumed: Curriculum = make()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for reward in (0.0, 1.0):
        a, b = whole.next_requests(5), resumed.next_requests(5)
        assert a == b
        whole.report([outcome(r, reward) for r in a])
        resumed.report([outcome(r, reward) for r in b])


def test_a_state_of_other_tasks_is_refused() -> None:
    state = TargetSolveRate({"a": ASK}).state_dict()
    with pytest.raises(CheckpointError, match=r"\['a'\].*\['b'\]"):
        TargetSolveRate({"b": ASK}).load_state_dict(state)
    with pytest.raises(CheckpointError, match="1 stages"):
        Stages([Stage(pair(), episodes=1), Stage(pair())]).load_state_dict(
            Stages([Stage(pair())]).state_dict()
        )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: FixedMix({}),
        lambda: FixedMix({"a": (ASK, 0.0)}),
        lambda: FixedMix({"a": (ASK, float("nan"))}),
        lambda: Stages([]),
        lambda: Stages([Stage(pair()), Stage(pair())]),
        lambda: TargetSolveRate({}),
        lambda: TargetSolveRate({"a": ASK}, target=1.0),
        lambda: TargetSolveRate({"a": ASK}, width=0.0),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        wrong()
