"""Where environments are built, and what a label may change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.sums import Sums
from ludic.agents import Agent
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.registry import AGENTS, CONTEXTS, ENVS, PARSERS, PROTOCOLS, Registry
from ludic.rollouts import RolloutEngine, RolloutRequest
from ludic.rollouts.episode_runner import EpisodeRunner
from ludic.rollouts.requests import PlannedEpisode
from ludic.types import EnvironmentStep, EnvSpec, ProtocolSpec, Rollout
from tests.rollouts.worlds import runtime


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


class Counting:
    """The one look-up of a name, counted."""

    def __init__(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        get = registry.get

        def counted(name: str) -> Callable[..., Any]:
            self.names.append(name)
            return get(name)

        monkeypatch.setattr(registry, "get", counted)


async def test_a_name_is_looked_up_once_per_call_and_every_episode_has_its_own_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registries = (ENVS, PROTOCOLS, AGENTS, PARSERS, CONTEXTS)
    counted = [Counting(registry, monkeypatch) for registry in registries]
    agents: list[Agent] = []
    monkeypatch.setattr(Agent, "__init__", _noting(Agent.__init__, agents))
    engine = RolloutEngine(runtime=runtime(lambda call: "1"))
    protocol = ProtocolSpec("single_agent", {"parser": ["text", {"kind": "regex", "pattern": "1"}]})
    request = RolloutRequest(EnvSpec("benchmarks.sums:Sums"), protocol, num_episodes=3)
    for call in (1, 2):
        rollouts = await engine.generate_rollouts([request, replace(request, env_seed=5)], 1)
        assert [r.error for r in rollouts] == [None] * 6
        names = [found.names for found in counted]
        assert names == [
            ["benchmarks.sums:Sums"] * call,
            ["single_agent"] * call,
            ["agent"] * call,
            ["text", "regex"] * call,
            ["full_dialog"] * call,
        ]
    assert len(agents) == 12
    assert len({id(agent.ctx) for agent in agents}) == len({id(a.parser) for a in agents}) == 12


def _noting(init: Callable[..., None], made: list[Any]) -> Callable[..., None]:
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    return noted


async def test_a_request_with_other_sampling_settings_has_a_protocol_of_its_own() -> None:
    engine = RolloutEngine(runtime=runtime(lambda call: "1"))
    request = RolloutRequest(EnvSpec("benchmarks.sums:Sums"), ProtocolSpec("single_agent"))
    cold = InferenceSpec(SamplingConfig(temperature=0.5))
    asked = [request, replace(request, inference=cold), request]
    rollouts = await engine.generate_rollouts(asked, 1)
    assert [r.agent_steps[0].sampling["temperature"] for r in rollouts] == [1.0, 0.5, 1.0]
