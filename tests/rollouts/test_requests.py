from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import ConfigError
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.rollouts import EnvSpec, GRPORequestStrategy, IdentityStrategy, RolloutRequest
from ludic.rollouts.requests import place_in_plan, plan_episodes
from ludic.types import ProtocolSpec, Rollout, from_json, to_json

seeds = st.none() | st.integers(0, 2**63 - 1)
requests = st.builds(
    RolloutRequest,
    env=st.builds(EnvSpec, st.just("e")),
    protocol=st.builds(ProtocolSpec, st.just("p")),
    env_seed=seeds,
    sampling_seed=seeds,
    num_episodes=st.integers(1, 4),
)


def request(**options: object) -> RolloutRequest:
    return RolloutRequest(EnvSpec("e"), ProtocolSpec("p"), **options)  # type: ignore[arg-type]


@given(st.lists(requests, max_size=4), st.integers(0, 99))
def test_a_plan_is_a_function_of_its_arguments(given: list[RolloutRequest], seed: int) -> None:
    plan = plan_episodes(given, seed=seed, prefix="p")
    assert plan == plan_episodes(given, seed=seed, prefix="p")
    assert len({e.id for e in plan}) == len(plan) == sum(r.num_episodes for r in given)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_seeds_that_requests_leave_open_are_all_different(
    count: int, episodes: int, seed: int
) -> None:
    plan = plan_episodes([request(num_episodes=episodes)] * count, seed=seed, prefix="p")
    found = [e.env_seed for e in plan] + [e.sampling_seed for e in plan]
    assert len(set(found)) == 2 * len(plan)
    later = plan_episodes([request(num_episodes=episodes)] * count, seed=seed, prefix="q")
    assert not set(found) & {s for e in later for s in (e.env_seed, e.sampling_seed)}


@given(st.lists(requests, min_size=1, max_size=3), st.integers(1, 5))
def test_a_group_shares_the_environments_seed_and_differs_in_the_samplings(
    given: list[RolloutRequest], size: int
) -> None:
    expanded = GRPORequestStrategy(size).expand(given)
    assert len(expanded) == size * sum(r.num_episodes for r in given)
    groups: dict[str | None, list[tuple[int, int]]] = {}
    for episode in plan_episodes(expanded, seed=1, prefix="p"):
        groups.setdefault(episode.group_id, []).append((episode.env_seed, episode.sampling_seed))
    assert len(groups) == sum(r.num_episodes for r in given)
    for members in groups.values():
        assert len(members) == size
        assert len({env for env, _ in members}) == 1
        assert len({sampling for _, sampling in members}) == size


def test_one_episode_uses_the_seeds_as_they_are_given() -> None:
    [episode] = plan_episodes([request(env_seed=3, sampling_seed=4)], seed=0, prefix="p")
    assert (episode.env_seed, episode.sampling_seed) == (3, 4)


def test_a_group_is_given_the_tasks_that_the_requests_alone_would_get() -> None:
    alone = plan_episodes([request(env_seed=3, num_episodes=2)], seed=0, prefix="p")
    expanded = GRPORequestStrategy(2).expand([request(env_seed=3, num_episodes=2)])
    grouped = plan_episodes(expanded, seed=0, prefix="p")
    assert {e.env_seed for e in alone} == {e.env_seed for e in grouped}


def test_episodes_of_one_request_with_a_group_are_that_group() -> None:
    plan = plan_episodes([request(group_id="g", num_episodes=3)], seed=0, prefix="p")
    assert len({e.env_seed for e in plan}) == 1
    assert len({e.sampling_seed for e in plan}) == 3


def test_a_group_with_two_environment_seeds_is_refused() -> None:
    both = [request(group_id="g", env_seed=1), request(group_id="g", env_seed=2)]
    with pytest.raises(ConfigError, match="env_seed=1 and env_seed=2"):
        plan_episodes(both, seed=0, prefix="p")


def test_groups_are_made_once() -> None:
    once = GRPORequestStrategy(2).expand([request()])
    with pytest.raises(ConfigError, match="already"):
        GRPORequestStrategy(2).expand(once)
    assert IdentityStrategy().expand(once) == once


def test_group_ids_of_different_batches_can_be_told_apart() -> None:
    one = GRPORequestStrategy(2).expand([request()], prefix="step-0/")
    other = GRPORequestStrategy(2).expand([request()], prefix="step-1/")
    assert {r.group_id for r in one}.isdisjoint({r.group_id for r in other})


@pytest.mark.parametrize("size", [0, -1])
def test_a_group_has_a_member(size: int) -> None:
    with pytest.raises(ConfigError, match="group_size"):
        GRPORequestStrategy(size)


def test_a_request_asks_for_an_episode() -> None:
    with pytest.raises(ConfigError, match="num_episodes=0"):
        request(num_episodes=0)


def test_requests_are_json() -> None:
    asked = request(
        env_seed=3,
        inference=InferenceSpec(SamplingConfig(temperature=0.5, stop=("x",))),
        meta={"a": [1, 2]},
    )
    assert from_json(RolloutRequest, to_json(asked)) == asked


def test_an_episodes_id_says_its_place_whatever_its_prefix() -> None:
    for prefix in ("p", "train/step-3"):
        plan = plan_episodes([request(num_episodes=2), request()], seed=0, prefix=prefix)
        rollouts = [Rollout("r", (), agent_id="a", episode_id=episode.id) for episode in plan]
        assert [place_in_plan(r) for r in rollouts] == [(0, 0), (0, 1), (1, 0)]
