"""Synthetic data: a scripted teacher plays the run's environments, and what it wrote is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from ludic.errors import ConfigError, InferenceError, RolloutError, nearest
from ludic.inference import HFChatTemplate, ScriptedChatClient, TokenCompletionRequest
from ludic.interaction import Runtime
from ludic.plumbing.arguments import misfit
from ludic.plumbing.files import replacing
from ludic.plumbing.given import given, is_given
from ludic.plumbing.lazy import resolve
from ludic.rollouts import FixedMix, RolloutWriter
from ludic.runs.episodes import inference_spec, requests_of, rollout_engine, tool_parser_of
from ludic.runs.results.terminal import episodes_bar
from ludic.runs.settings import RunConfig
from ludic.seeding import derive_seed
from ludic.types import ChatResponse, FinishReason, Fork, Message, TokenTrace

Teacher: TypeAlias = Callable[[Sequence[Message], Random], str]


def load_function(name: str) -> Callable[..., Any]:
    """Returns the function named by `module:function`, or given as an object."""
    if is_given(name):
        return given(name, "function")  # type: ignore[no-any-return]
    try:
        function = resolve(name)
    except (ImportError, AttributeError, TypeError, ValueError) as exc:
        near = ""
        if isinstance(exc, AttributeError) and exc.name is not None:
            names = [n for n, f in vars(exc.obj).items() if callable(f) and not n.startswith("_")]
            near = nearest(exc.name, names)
        raise ConfigError(
            f"{name!r} names no function in the form module:function: {exc}{near}"
        ) from exc
    if not callable(function):
        raise ConfigError(f"{name!r} is not a function")
    return function  # type: ignore[no-any-return]


def load_teacher(name: str) -> Teacher:
    """Returns a run's teacher as a function of the conversation and a random generator. The user's
    is given the last message's text, and those before it if it has an argument `history`."""
    function = load_function(name)
    try:
        with_history = "history" in signature(function).parameters
    except (TypeError, ValueError):  # some callables written in C have none
        with_history = False
    if why := misfit(function, ("", Random(0)), {"history": []} if with_history else {}):
        raise ConfigError(
            f"sft.teacher={name!r} is called with the observation, a random.Random and, if it has "
            f"an argument `history`, the messages before: {why}"
        )

    def teach(shown: Sequence[Message], rng: Random) -> str:
        *before, last = shown
        options = {"history": [copy.deepcopy(message) for message in before]}
        return str(function(last["content"], rng, **(options if with_history else {})))

    return teach


async def write_lessons(config: RunConfig, tokenizer: Any, path: Path) -> None:
    """Plays the run's examples with its teacher instead of the model, and writes them to
    `path`, all or none."""
    assert config.sft is not None
    assert config.sft.teacher is not None
    teacher = load_teacher(config.sft.teacher)
    seed = derive_seed(config.run.seed, "lessons")
    rng = Random(derive_seed(seed, "teacher"))
    template = _Overheard(tokenizer, tool_parser_of(config))
    client = _Uncut(lambda _: teacher(template.heard, rng), template)
    runtime = Runtime(client, template, "teacher", inference_spec(config))
    with episodes_bar(f"synthetic data by {config.sft.teacher}") as update:
        rollouts = await rollout_engine(config, runtime, seed=seed).generate_rollouts(
            FixedMix(requests_of(config), seed=seed).next_requests(config.sft.examples),
            max_steps=config.training.max_steps,
            concurrency=1,  # one after another, so that the teacher's choices come in one order
            on_progress=update,
        )
    failed = [rollout.error for rollout in rollouts if rollout.error is not None]
    if len(failed) == len(rollouts):
        raise RolloutError(f"every episode of the teacher failed, the first with: {failed[0]}")
    with replacing(path) as temporary, RolloutWriter(temporary) as writer:
        for rollout in rollouts:
            writer.write(rollout)


class _Uncut(ScriptedChatClient):
    """Raises where an answer is cut by length: a policy would learn from it not to end its own."""

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        response = await super().complete_tokens(request)
        if response.finish_reason is FinishReason.LENGTH:
            raise InferenceError(
                f"the teacher's answer takes more than {request.sampling.max_tokens} tokens: raise "
                "inference.sampling.max_tokens, or the context's limit"
            )
        return response


class _Overheard(HFChatTemplate):
    """A template that remembers the conversation it rendered, for a teacher that reads text."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.heard: list[Message] = []

    def for_tools(self) -> HFChatTemplate:
        template = super().for_tools()
        if not isinstance(template, _Overheard):
            template = self._for_tools = _Overheard(
                self.tokenizer, template.tool_parser, **self.options
            )
            template.heard = self.heard
        return template

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        self.heard[:] = messages
        return super().render(messages, tools)

    def extend(
        self,
        messages: Sequence[Message],
        previous: TokenTrace,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int] | Fork:
        self.heard[:] = messages
        return super().extend(messages, previous, tools)
