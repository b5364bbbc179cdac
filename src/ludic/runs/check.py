"""Finds what is wrong with a run before its folder is made or a step is trained."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from ludic.agents import Agent
from ludic.envs import LudicEnv, build_env
from ludic.envs.running.runner import close_env
from ludic.errors import ConfigError
from ludic.inference import HFChatTemplate, ScriptedChatClient
from ludic.inference.tiny import tiny_tokenizer
from ludic.interaction import Runtime
from ludic.registry import make_protocol
from ludic.runs.assemble import algorithm_of, sample_filter_of, sft_algorithm, trainer_config
from ludic.runs.episodes import (
    agents_of,
    ask,
    check_tools,
    inference_spec,
    requests_of,
    tool_parser_of,
    with_template,
)
from ludic.runs.model import build_model, check_device, configuring, tokenizer_of
from ludic.runs.players.scoring import check_scoring
from ludic.runs.players.seating import check_seating
from ludic.runs.players.teacher import load_teacher
from ludic.runs.ranks import check_ranks
from ludic.runs.settings import EnvSection, RunConfig
from ludic.runs.settings.base import read_key
from ludic.runs.settings.from_python import given_names
from ludic.runs.updates import check_loggers
from ludic.runs.vllm_backend import check_publishing
from ludic.training import RLAlgorithm
from ludic.training.credit_assignment.value_tracker import TrackedAdvantage
from ludic.types import EnvSpec

Env: TypeAlias = LudicEnv[Any, Any, Any]


def check_parts(config: RunConfig) -> None:
    """Raises if a part of the run is missing, does not fit, or could never train. Environments that
    are built for that are closed again."""
    with ExitStack() as closing:
        _check_parts(config, closing)


def _check_parts(config: RunConfig, closing: ExitStack) -> None:
    check_device(config.model)
    with_template(config, tiny_tokenizer())  # raises if the file cannot be read
    check_ranks(config)
    _check_pipeline(config)
    _check_workers(config)
    if config.model.name == "tiny":  # any other takes too long to load twice
        build_model(config)
    check_loggers(config)
    algorithm = algorithm_of(config)
    envs = [_make_env(section, closing) for section in config.env]
    for section in config.eval.env:
        _make_env(section, closing)
    agents = _make_agents(config)
    _check_windows(config, [*agents, *_make_agents(config, held_out=True)], envs)
    check_seating(config, algorithm)
    if config.sft is not None:
        _check_sft(config)
    _check_sampling(config)
    check_publishing(config)
    if config.training.steps:
        _check_training(config)
        _check_algorithm(config, algorithm)
        if isinstance(algorithm.credit_assigner, TrackedAdvantage):
            _check_tracking(config, algorithm.credit_assigner, envs, agents)
    elif config.sft is None or not config.sft.steps:
        raise ConfigError(
            "this run trains nothing: set training.steps or sft.steps above 0; `ludic eval` "
            "measures a model as it is"
        )


def check_programs(config: RunConfig, *, held_out: bool = False) -> None:
    """Raises if this machine lacks a program that an environment or a tool of the run needs: for
    what plays its episodes, or its held-out ones, without training."""
    with ExitStack() as closing:
        for section in config.eval.env if held_out and config.eval.env else config.env:
            _make_env(section, closing)
    _make_agents(config, held_out=held_out)


def _check_pipeline(config: RunConfig) -> None:
    """Raises if a run over Redis asks for what only one process can do."""
    section, training = config.pipeline, config.training
    if section is None:
        return
    rules = (
        (not training.overlap, "training.overlap: actors sample ahead by themselves"),
        (not training.dynamic_sampling, "training.dynamic_sampling: leave it out"),
        (not training.past_opponents, "training.past_opponents: leave it out"),
        (not training.workers, "training.workers: its actors are processes already"),
    )
    for ok, what in rules:
        if not ok:
            raise ConfigError(f"a run over Redis ([pipeline], --async) cannot have {what}")
    # What is missing is said now, and not after the cold start.
    import_module("ludic.pipeline.store")
    if import_module("ludic.runs.pipeline.address").starts_redis(section):
        import_module("ludic.pipeline.local_redis").find_redis_server()
    if given := given_names(config.plain()):
        raise ConfigError(
            f"actors are other processes, and {', '.join(given)} is an object of this script: put "
            "it into a module, and name it as module:name"
        )


def _check_workers(config: RunConfig) -> None:
    """Raises if episodes are to be played in processes that cannot have what they are made of."""
    played = {"env": config.plain()["env"], "protocol": config.plain()["protocol"]}
    if config.training.workers and (given := given_names(played)):
        raise ConfigError(
            f"training.workers={config.training.workers}: episodes are played in other processes, "
            f"and {', '.join(given)} is an object of this script: put it into a module, or leave "
            "training.workers out"
        )


def _make_env(section: EnvSection, closing: ExitStack) -> Env:
    with configuring(f"environment {section.kind!r} with {section.kwargs}"):
        env = build_env(EnvSpec(section.kind, section.kwargs), isolation=section.isolation)
        closing.callback(close_env, env, section.kind)
        ask(env)
        return env


def _make_agents(config: RunConfig, *, held_out: bool = False) -> list[Agent]:
    """Builds each protocol once, on a model that says nothing, and returns its agents."""
    template = HFChatTemplate(tiny_tokenizer(), tool_parser_of(config))
    client = ScriptedChatClient([""], template)
    runtime = Runtime(client, template, config.model.name, inference_spec(config))
    others = {player.name: replace(runtime, model=player.name) for player in config.player}
    runtime = replace(runtime, others=others)
    found: list[Agent] = []
    for request, _ in requests_of(config, held_out=held_out).values():
        spec = request.protocol
        with configuring(f"protocol {spec.kind!r}"):
            protocol = make_protocol(spec.kind, runtime, **spec.kwargs)
            check_tools(agents_of(protocol, request))
            found += agents_of(protocol, request, trained=True)
    return found


def _check_windows(config: RunConfig, agents: Sequence[Agent], envs: Sequence[Env]) -> None:
    """Raises if the window of a context that compacts is too small, where it is stated. Otherwise
    it is the model's, and the first episode finds out."""
    compacting = [agent for agent in agents if agent.compactor is not None]
    stated = config.inference.max_context_tokens
    if not compacting or (any(agent.context_limit is None for agent in compacting) and not stated):
        return
    template = HFChatTemplate(tokenizer_of(config), tool_parser_of(config))
    for agent in compacting:
        agent.client = ScriptedChatClient([""], template, max_context_tokens=stated)
        agent.chat_template = template
        if agent.tool_request is not None:
            agent.chat_template = template.for_tools()
        prompts = [agent.system_prompt]
        if agent.system_prompt is None:
            with suppress(Exception):  # an environment may know its prompts only after a reset
                prompts = [env.suggested_sysprompt(role) for env in envs for role in env.agent_ids]
        assert agent.compactor is not None
        for prompt in prompts:
            agent.compactor.check(prompt)


def _check_sft(config: RunConfig) -> None:
    sft = config.sft
    assert sft is not None
    sft_algorithm(config)
    if sft.teacher is not None:
        load_teacher(sft.teacher)
    elif not os.path.isfile(sft.data or ""):
        raise ConfigError(f"sft.data={sft.data!r}: there is no such file")
    if sft.steps:
        trainer_config(config, "sft", Path())


def _check_sampling(config: RunConfig) -> None:
    read_key(config.inference, "inference")
    sampling, backend = config.inference.sampling, config.inference.backend
    taught = config.sft is not None and config.sft.teacher is not None
    if sampling.temperature == 0 and (taught or config.training.steps):
        raise ConfigError(
            "inference.sampling.temperature=0 always gives the same answer, so nothing can be "
            "learned: set it above 0; for greedy evaluation set eval.temperature=0"
        )
    kept = backend == "local" or (config.inference.servers and sampling.top_k)
    if config.training.steps and inference_spec(config).returns.kept_ids and not kept:
        raise ConfigError(
            "inference.sampling with top_p, top_k or min_p can be trained on with vLLM only if the "
            "server reports which tokens it kept: set top_k above 0 and name servers that were "
            "started with --return-sampling-mask in inference.servers, or leave all three out"
        )


def _check_training(config: RunConfig) -> None:
    training = config.training
    if training.schedule != "constant" and training.warmup_steps >= training.steps:
        raise ConfigError(
            f"training.warmup_steps={training.warmup_steps} leaves nothing of training.steps="
            f"{training.steps} for the {training.schedule} schedule: warm up for fewer steps"
        )
    trainer_config(config, "rl", Path())


def _check_algorithm(config: RunConfig, algorithm: RLAlgorithm) -> None:
    size, episodes = algorithm.group_size or 1, config.training.rollouts_per_update
    if episodes % size:
        raise ConfigError(
            f"training.rollouts_per_update={episodes} is not a multiple of group_size={size}: a "
            "batch holds whole groups"
        )
    if config.training.dynamic_sampling and size == 1:
        raise ConfigError(
            f"training.dynamic_sampling is for an algorithm that compares groups, and "
            f"{config.algorithm.name!r} does not: leave it out, or choose one such as 'grpo'"
        )
    sample_filter_of(config)
    check_scoring(config, algorithm, list(requests_of(config)))


def _check_tracking(
    config: RunConfig, credit: TrackedAdvantage, envs: Sequence[Env], agents: Sequence[Agent]
) -> None:
    """Raises if tasks have no names, or if returns are known to leave the tracker's interval: from
    an environment's `return_range`, and from the parser's reward for an empty answer."""
    name, steps, (low, high) = config.algorithm.name, config.training.max_steps, credit.returns
    named = config.curriculum.kind != "uncertain"  # it names them itself
    penalty = min((agent.parser("").reward for agent in agents), default=0.0)
    for section, env in zip(config.env, envs, strict=True):
        if named and type(env).task_key is LudicEnv.task_key:
            raise ConfigError(
                f"algorithm {name!r} tracks a value per task, and environment {section.kind!r} "
                "names none: define its task_key(), choose another algorithm, or write a script "
                "that sets RolloutRequest.task_key"
            )
        lowest, highest = env.return_range or (max(low, 0.0), high)
        slips = steps * min(penalty, 0.0)
        if lowest + slips < low - 1e-9 or highest > high + 1e-9:
            parser = f" (the parser gives {penalty:g} for what it cannot read, up to {steps} times)"
            raise ConfigError(
                f"algorithm {name!r} tracks returns in [{low:g}, {high:g}], but in "
                f"{section.kind!r} "
                f"they can be from {lowest + slips:g} to {highest:g}{parser if slips else ''}: set "
                "algorithm.kwargs.returns = [lowest, highest], or the parser's error_reward to 0"
            )
