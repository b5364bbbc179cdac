"""Groups that are not what was asked for: dropped with their reason, and asked for again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ludic.errors import PipelineError
from ludic.pipeline import PipelineConfig
from ludic.pipeline.messages import Group, group_message, read_unit
from ludic.pipeline.store import Store, entries
from ludic.rollouts import EnvSpec, RolloutEngine
from ludic.types import Rollout
from tests.pipeline.test_batch_source import acting, announced, units_of
from tests.pipeline.world import make_engine, make_source

pytestmark = pytest.mark.redis

Change = Callable[[Group], Group]


def with_first(**labels: Any) -> Change:
    def change(group: Group) -> Group:
        first, *rest = group.rollouts
        return replace(group, rollouts=(first.labelled(**labels), *rest))

    return change


WRONG: dict[str, Change] = {
    "3 episodes for 4": lambda g: replace(g, rollouts=g.rollouts[:-1]),
    "0 episodes for 4": lambda g: replace(g, rollouts=()),
    "group 9 for unit 0": lambda g: replace(g, number=9),
    "4 rollouts with 3 ids": lambda g: replace(g, rollouts=(g.rollouts[1], *g.rollouts[1:])),
    "4 episodes for 4, among them 'unit-7/0/0'": with_first(episode_id="unit-7/0/0"),
    "of group 'theirs'": with_first(group_id="theirs"),
    "of another env": with_first(env=EnvSpec("guess", {"tries": 99})),
    "of another protocol": with_first(protocol=None),
}


@pytest.mark.parametrize("fault", WRONG)
async def test_a_group_that_is_not_what_was_asked_for_is_dropped_and_sampled_again(
    config: PipelineConfig, store: Store, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = await announced(make_source(config))
    await source.open()
    await source._ask_more()
    ((entry, number, message),) = entries(store.run("take", "by-hand", 1, 60_000, "0-0")[1])
    unit = read_unit(message)
    engine, _ = make_engine()
    rollouts = await engine.generate_rollouts(unit.requests, unit.max_steps, prefix=unit.prefix)
    wrong = group_message(WRONG[fault](Group(number, tuple(rollouts), "by-hand")))
    assert store.run("append", "by-hand", entry, number, wrong, 0) == b"ok"
    async with acting(config):
        batch = await source.next_batch()
    assert source.ledger.dropped == {"malformed": 1}
    assert fault in caplog.text
    assert units_of(batch) == [1, 2]
    again = [a.of for a in (*source.ledger.outstanding.values(), *source.ledger.waiting)]
    assert again.count(0) == 1
    # A trainer that goes on from here finds nothing that stops it.
    state = source.state_dict()
    await source.close()
    resumed = make_source(config)
    resumed.load_state_dict(state)
    await announced(resumed)
    async with acting(config):
        assert units_of(await resumed.next_batch()) == [3, 4]
    await resumed.close()


class Careless(RolloutEngine):
    """Loses an episode of every unit."""

    async def generate_rollouts(self, *args: Any, **options: Any) -> list[Rollout]:
        return (await super().generate_rollouts(*args, **options))[1:]


async def test_an_actor_that_only_sends_wrong_groups_ends_the_run_with_its_name(
    config: PipelineConfig, store: Store
) -> None:
    engine, _ = make_engine()
    engine.__class__ = Careless
    source = await announced(make_source(config))
    source._bad.most = 8
    async with acting(config, name="careless", engine=engine):
        with pytest.raises(PipelineError, match=r"9 groups came .*'careless' sent 3 episodes"):
            await source.next_batch()
    await source.close()
