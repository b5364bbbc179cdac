"""Synthetic data: a scripted teacher plays the run's environments, and what it wrote is kept."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from ludic.runs.assemble import load_function
from ludic.inference import HFChatTemplate, InferenceSpec, ScriptedChatClient
from ludic.inference.templates.chat_template import ParsedCompletion
from ludic.inference.scripted_client import ScriptedCall
from ludic.interaction import Runtime
from ludic.rollouts import FixedMix, RolloutEngine, RolloutRequest, RolloutWriter
from ludic.rollouts.progress import ProgressCallback
from ludic.seeding import derive_seed
from ludic.types import ChatResponse, Fork, Message, TokenTrace


async def write_lessons(
    path: Path,
    teacher: str,
    requests: Mapping[str, tuple[RolloutRequest, float]],
    *,
    template: HFChatTemplate,
    inference: InferenceSpec,
    episodes: int,
    max_steps: int,
    seed: int,
    on_progress: ProgressCallback | None = None,
) -> None:
    """Plays `episodes` episodes with the function `teacher` in the model's place and writes them
    to `path`, whole or not at all."""
    function = load_function(teacher)
    rng = Random(derive_seed(seed, "teacher"))
    overheard = _Overheard(template)

    def script(_: ScriptedCall) -> str:
        return str(function(overheard.last, rng))

    runtime = Runtime(ScriptedChatClient(script, template), overheard, "teacher", inference)
    rollouts = await RolloutEngine(runtime=runtime, seed=seed).generate_rollouts(
        FixedMix(requests, seed=seed).next_requests(episodes),
        max_steps=max_steps,
        concurrency=1,  # one after another, so that the teacher's choices come in one order
        on_progress=on_progress,
    )
    temporary = path.with_name(f"{os.getpid()}-{path.name}")
    with RolloutWriter(temporary) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    os.replace(temporary, path)


class _Overheard:
    """A template that remembers the last message it spelled, for a teacher that reads text."""

    def __init__(self, template: HFChatTemplate) -> None:
        self._template = template
        self.last = ""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        self.last = messages[-1]["content"]
        return self._template.render(messages, tools)

    def extend(
        self,
        messages: Sequence[Message],
        previous: TokenTrace,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int] | Fork:
        self.last = messages[-1]["content"]
        return self._template.extend(messages, previous, tools)

    def parse(self, response: ChatResponse) -> ParsedCompletion:
        return self._template.parse(response)
