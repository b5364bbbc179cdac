"""Where environments are built, and what a label may change."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from benchmarks.sums import Sums
from ludic.rollouts import RolloutRequest
from ludic.rollouts.episode_runner import EpisodeRunner
from ludic.rollouts.planning import PlannedEpisode
from ludic.types import EnvironmentStep, EnvSpec, ProtocolSpec, Rollout


class Noting(Sums):
    """Notes the thread that built it."""

    def __init__(self) -> None:
        super().__init__()
        self.built_in = threading.get_ident()


class Blocking(Noting):
    blocking = True


@pytest.mark.parametrize("by_name", [True, False])
async def test_only_an_environment_that_may_block_is_built_in_another_thread(by_name: bool) -> None:
    for kind in (Noting, Blocking):
        name = f"{kind.__module__}:{kind.__name__}"
        runner = EpisodeRunner(None if by_name else {name: kind}, None, None, 60.0, 600.0)
        request = RolloutRequest(EnvSpec(name), ProtocolSpec("single_agent"))
        env = await runner._make_env(PlannedEpisode("e", request, 0, 0))
        assert isinstance(env, kind)
        assert (env.built_in == threading.get_ident()) == (not kind.blocking)


def test_a_rollout_under_another_label_keeps_everything_else() -> None:
    rollout = Rollout("a", (EnvironmentStep(0, (), "", None, "", 1.0),), meta={"x": 1})
    assert rollout.labelled(group_id="g") == replace(rollout, group_id="g")
    assert rollout.group_id is None
    with pytest.raises(TypeError, match="colour"):
        rollout.labelled(colour="red")
