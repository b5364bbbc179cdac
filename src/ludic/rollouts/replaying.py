"""Replay: runs a recorded episode again and reports where it first differs, if it does.

The episode goes through the same protocol as the first time, with the recorded seeds. What the
model said comes from the record, so that neither a model nor a tokenizer is needed: tools, parsers,
bots and the environment run again, and every message, action, observation, reward, ending and info
is compared. Given a chat template, prompts are rendered again too and compared token by token.
Given a runtime, nothing comes from the record: the model samples again with the recorded seeds,
which must give the same tokens where the backend is deterministic and has the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ludic.errors import RolloutError
from ludic.inference.sampling import InferenceSpec
from ludic.inference.templates.chat_template import ChatTemplate
from ludic.interaction.base import Runtime
from ludic.registry import stored_names
from ludic.rollouts.divergence import Divergence, first_divergence
from ludic.rollouts.episode_runner import EnvFactory, EpisodeRunner, ProtocolFactory
from ludic.rollouts.requests import PlannedEpisode, RolloutRequest
from ludic.rollouts.tape import Tape, TapeClient, TapeTemplate
from ludic.types import Rollout, from_json


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found: the first divergence, if any, and how much agreed up to there."""

    divergence: Divergence | None
    steps: int
    tokens: int
    rollouts: tuple[Rollout, ...]
    """What the replay produced."""

    @property
    def matches(self) -> bool:
        return self.divergence is None


async def replay(
    rollouts: Rollout | Sequence[Rollout],
    *,
    runtime: Runtime | None = None,
    chat_template: ChatTemplate | None = None,
    env_registry: Mapping[str, EnvFactory] | None = None,
    protocol_registry: Mapping[str, ProtocolFactory] | None = None,
    step_timeout_s: float | None = 60.0,
    episode_timeout_s: float | None = 600.0,
) -> ReplayReport:
    """Runs the episode of `rollouts` again and compares. An episode of several agents needs the
    rollouts of all of them.

    With `runtime` the model samples again; with `chat_template` only prompts are made again; with
    neither, messages stand for tokens. Raises `RolloutError` for rollouts that do not say where
    they come from, or are of different episodes.
    """
    recorded = [rollouts] if isinstance(rollouts, Rollout) else list(rollouts)
    episode, max_steps = _episode_of(recorded)
    tape = Tape(recorded)
    with_tokens = runtime is not None or chat_template is not None
    if runtime is None:
        runtime = Runtime(
            TapeClient(tape, with_tokens=with_tokens),
            TapeTemplate(tape) if chat_template is None else chat_template,
            "replay",
        )
        # A tape ignores sampling settings.
        episode = replace(episode, request=replace(episode.request, inference=None))
    runner = EpisodeRunner(
        env_registry, protocol_registry, runtime, step_timeout_s, episode_timeout_s
    )
    with stored_names():  # whoever wrote the file must not choose what is imported here
        replayed = await runner.run(episode, max_steps)
    _check_errors(recorded, replayed, tape)
    return _compared(recorded, replayed, with_tokens)


def _episode_of(rollouts: Sequence[Rollout]) -> tuple[PlannedEpisode, int]:
    if not rollouts:
        raise RolloutError("replay needs at least one rollout")
    first = rollouts[0]
    episodes = {r.episode_id for r in rollouts}
    if len(episodes) > 1:
        raise RolloutError(f"replay takes the rollouts of one episode, not of {sorted(episodes)}")
    if first.env is None or first.protocol is None or first.env_seed is None:
        raise RolloutError(
            f"rollout {first.id!r} does not say which environment, protocol and seed it comes "
            "from: only rollouts of a RolloutEngine can be replayed"
        )
    inference = first.meta.get("inference")
    request = RolloutRequest(
        first.env,
        first.protocol,
        inference=None if inference is None else from_json(InferenceSpec, json.dumps(inference)),
    )
    seed = first.sampling_seed if first.sampling_seed is not None else 0
    episode = PlannedEpisode(first.episode_id, request, first.env_seed, seed)
    return episode, int(first.meta.get("max_steps", 100))


def _check_errors(recorded: Sequence[Rollout], replayed: Sequence[Rollout], tape: Tape) -> None:
    """A replay that could not be run at all is an error and not a divergence."""
    if tape.unknown is not None:
        raise RolloutError(
            f"the episode has a rollout {tape.unknown!r} that replay was not given: pass all "
            f"rollouts of episode {recorded[0].episode_id!r}"
        )
    known = {r.id for r in recorded}
    failed = next((r for r in replayed if r.error is not None and r.id not in known), None)
    if failed is not None:
        raise RolloutError(f"the episode could not be run again: {failed.error}")


def _compared(
    recorded: Sequence[Rollout], replayed: Sequence[Rollout], with_tokens: bool
) -> ReplayReport:
    by_id = {r.id: r for r in replayed}
    found: list[Divergence] = []
    steps = tokens = 0
    for rollout in recorded:
        again = by_id.get(rollout.id)
        if again is None:
            found.append(Divergence(rollout.id, 0, "rollout", "there", None))
            continue
        divergence, same_steps, same_tokens = first_divergence(
            rollout, again, with_tokens=with_tokens
        )
        steps, tokens = steps + same_steps, tokens + same_tokens
        if divergence is not None:
            found.append(divergence)
    extra = [r for r in replayed if r.id not in {one.id for one in recorded}]
    found.extend(Divergence(r.id, 0, "rollout", None, "there") for r in extra)
    first = min(found, key=lambda d: d.step, default=None)
    return ReplayReport(first, steps, tokens, tuple(replayed))
