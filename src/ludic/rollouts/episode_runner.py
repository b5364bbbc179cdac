"""Runs one planned episode: builds its environment and protocol by name, and labels the outcome."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any, Generic, TypeAlias, TypeVar

from ludic.envs import build_env
from ludic.envs.env import LudicEnv
from ludic.envs.process import own_kwargs
from ludic.envs.runner import EnvRunner, close_env
from ludic.errors import ConfigError, EnvError, ProtocolError, UnknownNameError
from ludic.inference.sampling import InferenceSpec
from ludic.interaction.base import InteractionProtocol, RunSpec, Runtime
from ludic.interaction.episode import CONFIGURATION_ERRORS
from ludic.interaction.factories import single_agent_maker, single_agent_protocol
from ludic.plumbing.text import TRACEBACK, described, users_traceback
from ludic.registry import ENVS, PROTOCOLS
from ludic.rollouts.requests import PlannedEpisode
from ludic.types import EnvSpec, ProtocolSpec, Rollout, to_json
from ludic.workers.deadlines import bounded
from ludic.workers.threads import contained, is_for_us, shared_threads

EnvFactory: TypeAlias = Callable[..., LudicEnv[Any, Any, Any]]
ProtocolFactory: TypeAlias = Callable[..., InteractionProtocol]
Factory = TypeVar("Factory", bound=Callable[..., Any])
Made = TypeVar("Made")

GRACE_S = 5.0
"""How much longer than its own deadline a protocol may take before it is stopped from outside."""


@dataclass(frozen=True, slots=True)
class _Maker(Generic[Made]):
    """Builds what `described` says. It is kept by the `id` of that, and hence holds on to it."""

    described: object
    make: Callable[[], Made]
    at_once: bool = True
    whom: str = ""


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """How episodes are built and bounded. Registries map names to factories; None stands for the
    global registry. An environment's factory is called with the spec's arguments, a protocol's
    with the runtime and then the spec's arguments. What a spec names is looked up when an episode
    first needs it, and kept. Environments whose kind is in `isolated` run in processes of their
    own, whatever they say themselves."""

    env_registry: Mapping[str, EnvFactory] | None
    protocol_registry: Mapping[str, ProtocolFactory] | None
    runtime: Runtime | None
    step_timeout_s: float | None
    episode_timeout_s: float | None
    isolated: frozenset[str] = frozenset()
    _env_makers: dict[int, _Maker[LudicEnv[Any, Any, Any]]] = field(
        default_factory=dict, init=False, compare=False
    )
    _protocol_makers: dict[tuple[int, int], _Maker[InteractionProtocol]] = field(
        default_factory=dict, init=False, compare=False
    )

    @property
    def specs(self) -> int:
        """For how many environments there is something kept."""
        return len(self._env_makers)

    def afresh(self) -> EpisodeRunner:
        """The same runner, with everything still to be looked up."""
        return replace(self)

    async def run(self, episode: PlannedEpisode, max_steps: int) -> list[Rollout]:
        """The episode's rollouts, one per agent. Never raises for what goes wrong inside: then
        they carry `error`, and there is at least one. Errors of configuration propagate."""
        try:
            rollouts = await self._play(episode, max_steps)
        except CONFIGURATION_ERRORS:
            raise
        except BaseException as exc:  # one failure costs one episode
            if is_for_us(exc):
                raise
            return failed_episode(episode, max_steps, described(exc), users_traceback(exc))
        if not rollouts:
            return failed_episode(episode, max_steps, "the protocol returned no rollout")
        return [_labelled(rollout, episode, max_steps) for rollout in rollouts]

    async def _play(self, episode: PlannedEpisode, max_steps: int) -> list[Rollout]:
        env = await self._make_env(episode)
        try:
            protocol = self._make_protocol(episode)
        except BaseException:
            await self._close(env)
            raise
        limit = self.episode_timeout_s
        spec = RunSpec(
            episode.id,
            episode.env_seed,
            episode.sampling_seed,
            max_steps,
            self.step_timeout_s,
            limit,
        )
        if limit is not None:  # the protocol keeps it itself; this one holds when it does not
            limit += GRACE_S
        what, whom = f"the end of episode {episode.id}", type(protocol).__name__
        try:
            return await bounded(protocol.run(env, spec), what, whom, limit)
        except ProtocolError:
            await self._close(env)
            raise

    async def _close(self, env: LudicEnv[Any, Any, Any]) -> None:
        """A protocol closes its environment; where it never began to, that is left to us."""
        await EnvRunner(env, step_timeout_s=self.step_timeout_s).close()

    async def _make_env(self, episode: PlannedEpisode) -> LudicEnv[Any, Any, Any]:
        spec = episode.request.env
        maker = self._env_makers.get(id(spec)) or self._keep_env_maker(spec)
        with contained(EnvError, maker.whom):
            if maker.at_once:
                return maker.make()
            return await self._make_in_thread(maker.make, f"environment {spec.kind!r}")

    async def _make_in_thread(
        self, make: Callable[[], LudicEnv[Any, Any, Any]], whom: str
    ) -> LudicEnv[Any, Any, Any]:
        """Building may read a dataset or start a process, so it must not hold up the others. What
        is built for nobody is closed: past the deadline by the thread that built it."""
        built: list[LudicEnv[Any, Any, Any]] = []
        late = Event()
        try:
            await shared_threads().run(
                lambda: built.append(make()),
                what="its construction",
                whom=whom,
                timeout_s=self.step_timeout_s,
                on_abandon=late.set,
                on_return=lambda: close_env(built[0], whom) if built else None,
            )
        except BaseException:
            if built and not late.is_set():  # cancelled in the moment in which it was finished
                await self._close(built[0])
            raise
        return built[0]

    def _keep_env_maker(self, spec: EnvSpec) -> _Maker[LudicEnv[Any, Any, Any]]:
        own, isolated = self.env_registry, spec.kind in self.isolated
        factory: Any = None  # of an isolated one, its own process looks it up
        if own is not None:
            factory = _look_up("environment", spec.kind, own)
        elif not isolated:
            factory = ENVS.get(spec.kind)
        at_once = isolated or _answers_at_once(factory)

        def build() -> Any:
            kwargs = own_kwargs(spec)
            if own is not None:
                return factory(**kwargs)
            return ENVS.make_with(factory, spec.kind, (), kwargs)

        make: Callable[[], Any] = partial(build_env, spec)
        if isolated:
            make = partial(build_env, spec, factory, isolation="process")
        elif own is not None or at_once:
            make = build
        whom = f"environment {spec.kind!r}, while it was built,"
        maker = self._env_makers[id(spec)] = _Maker(spec, make, at_once, whom)
        return maker

    def _make_protocol(self, episode: PlannedEpisode) -> InteractionProtocol:
        spec, inference = episode.request.protocol, episode.request.inference
        maker = self._protocol_makers.get((id(spec), id(inference)))
        return (maker or self._keep_protocol_maker(spec, inference)).make()

    def _keep_protocol_maker(
        self, spec: ProtocolSpec, inference: InferenceSpec | None
    ) -> _Maker[InteractionProtocol]:
        runtime = self.runtime
        make: Callable[[], InteractionProtocol]
        if inference is not None:
            if runtime is None:
                raise ConfigError(
                    "a request has its own `inference`, but the engine has no runtime to "
                    "apply it to: pass RolloutEngine(runtime=Runtime(client, template, model))"
                )
            runtime = replace(runtime, inference=inference)
        if self.protocol_registry is not None:
            factory = _look_up("protocol", spec.kind, self.protocol_registry)
            make = partial(factory, runtime, **spec.kwargs)
        elif runtime is None:
            raise ConfigError(
                f"protocol {spec.kind!r} needs a model to talk to: pass "
                "RolloutEngine(runtime=Runtime(client, template, model))"
            )
        else:
            factory = PROTOCOLS.get(spec.kind)
            if factory is single_agent_protocol:
                make = PROTOCOLS.make_with(single_agent_maker, spec.kind, (runtime,), spec.kwargs)
            else:
                make = partial(PROTOCOLS.make_with, factory, spec.kind, (runtime,), spec.kwargs)
        maker = self._protocol_makers[id(spec), id(inference)] = _Maker((spec, inference), make)
        return maker


def failed_episode(
    episode: PlannedEpisode, max_steps: int, error: str, trace: str | None = None
) -> list[Rollout]:
    """What stands for an episode of which nothing was recorded but its error."""
    meta = {TRACEBACK: trace} if trace else {}
    failed = Rollout(id=f"{episode.id}/failed", steps=(), error=error, meta=meta)
    return [_labelled(failed, episode, max_steps)]


def _look_up(kind: str, name: str, registry: Mapping[str, Factory]) -> Factory:
    try:
        return registry[name]
    except KeyError:
        raise UnknownNameError(kind, name, registry) from None


def _answers_at_once(factory: Any) -> bool:
    return isinstance(factory, type) and not (
        getattr(factory, "blocking", True) or getattr(factory, "isolation", "") == "process"
    )


def _labelled(rollout: Rollout, episode: PlannedEpisode, max_steps: int) -> Rollout:
    """Writes on the rollout where it comes from, all that is needed to repeat it."""
    request = episode.request
    meta: dict[str, Any] = {**request.meta, **rollout.meta, "max_steps": max_steps}
    if episode.attempt:
        meta["attempt"] = episode.attempt
    if request.inference is not None:
        meta["inference"] = json.loads(to_json(request.inference))
    return rollout.labelled(
        id=_under(episode.id, rollout.id),
        parent_id=None if rollout.parent_id is None else _under(episode.id, rollout.parent_id),
        episode_id=episode.id,
        group_id=request.group_id,
        task_key=request.task_key if request.task_key is not None else rollout.task_key,
        env=request.env,
        protocol=request.protocol,
        env_seed=episode.env_seed,
        sampling_seed=episode.sampling_seed,
        meta=meta,
    )


def _under(episode_id: str, name: str) -> str:
    """Ids of a protocol that does not use the episode's would clash with other episodes'."""
    return name if name.startswith(episode_id) else f"{episode_id}/{name}"
