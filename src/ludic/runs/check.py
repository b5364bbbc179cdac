"""What is wrong with a run, found before its folder is made or a step is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ludic.envs import LudicEnv, build_env
from ludic.errors import ConfigError
from ludic.inference import HFChatTemplate, ScriptedChatClient
from ludic.inference.tiny import tiny_tokenizer
from ludic.interaction import DelegatingProtocol, MultiAgentProtocol, Runtime
from ludic.registry import make_protocol
from ludic.rollouts import RolloutRequest
from ludic.runs.assemble import (
    algorithm_of,
    inference_spec,
    load_function,
    requests_of,
    tool_parser_of,
    trainer_config,
)
from ludic.runs.model import build_model, check_device, configuring
from ludic.runs.opponents import check_seating
from ludic.runs.settings import EnvSection, RunConfig
from ludic.training import RLAlgorithm, make_algorithm
from ludic.training.algorithms.opd import OnPolicyDistillationLoss
from ludic.training.credit_assignment.value_tracker import TrackedAdvantage
from ludic.training.losses.kl import TokenKLLoss
from ludic.types import EnvSpec

Env: TypeAlias = LudicEnv[Any, Any, Any]


def check_parts(config: RunConfig) -> None:
    """Raises for a part that is not there, does not fit, or could never be trained."""
    check_device(config.model)
    if config.model.name == "tiny":  # any other takes too long to load twice
        build_model(config)
    algorithm = algorithm_of(config)
    envs = [_make_env(section) for section in config.env]
    for section in config.eval.env:
        _make_env(section)
    _check_protocols(config)
    check_seating(config)
    if config.sft is not None:
        _check_sft(config)
    _check_sampling(config)
    if config.training.steps:
        _check_training(config)
        _check_algorithm(config, algorithm, envs)
    elif config.sft is None or not config.sft.steps:
        raise ConfigError(
            "this run trains nothing: set training.steps or sft.steps above 0; `ludic eval` "
            "measures a model as it is"
        )


def _make_env(section: EnvSection) -> Env:
    with configuring(f"environment {section.kind!r} with {section.kwargs}"):
        return build_env(EnvSpec(section.kind, section.kwargs))


def _check_protocols(config: RunConfig) -> None:
    """Makes each protocol once, with its agents, for a model that says nothing."""
    template = HFChatTemplate(tiny_tokenizer(), tool_parser_of(config))
    client = ScriptedChatClient([""], template)
    runtime = Runtime(client, template, config.model.name, inference_spec(config))
    for held_out in (False, True):
        for request, _ in requests_of(config, held_out=held_out).values():
            with configuring(f"protocol {request.protocol.kind!r}"):
                _make_players(request, runtime)


def _make_players(request: RolloutRequest, runtime: Runtime) -> None:
    spec = request.protocol
    protocol = make_protocol(spec.kind, runtime, **spec.kwargs)
    if isinstance(protocol, MultiAgentProtocol) and protocol.default is not None:
        for seat in build_env(request.env).agent_ids:
            if seat not in protocol.players:
                protocol.default(seat)
    elif isinstance(protocol, DelegatingProtocol):
        for make_agent in (protocol.parent, *(s.make_agent for s in protocol.sub_agents.values())):
            make_agent(())


def _check_sft(config: RunConfig) -> None:
    sft = config.sft
    assert sft is not None
    with configuring(f"sft.aggregation={sft.aggregation!r}"):
        make_algorithm("sft", aggregation=sft.aggregation)
    if sft.teacher is not None:
        load_function(sft.teacher)
    elif not Path(sft.data or "").is_file():
        raise ConfigError(f"sft.data={sft.data!r}: there is no such file")
    if sft.steps:
        trainer_config(config, "sft", Path())


def _check_sampling(config: RunConfig) -> None:
    sampling, backend = config.inference.sampling, config.inference.backend
    taught = config.sft is not None and config.sft.teacher is not None
    if sampling.temperature == 0 and (taught or config.training.steps):
        raise ConfigError(
            "inference.sampling.temperature=0 always gives the same answer, from which nothing is "
            "learnt: set it above 0; eval.temperature=0 is for an evaluation without chance"
        )
    kept = backend == "local" or (config.inference.servers and sampling.top_k)
    if config.training.steps and inference_spec(config).returns.kept_ids and not kept:
        raise ConfigError(
            "inference.sampling with top_p, top_k or min_p is trained on with vLLM only where the "
            "server says which tokens it kept: set top_k above 0 and name servers that were "
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


def _check_algorithm(config: RunConfig, algorithm: RLAlgorithm, envs: Sequence[Env]) -> None:
    size, episodes = algorithm.group_size or 1, config.training.rollouts_per_update
    if episodes % size:
        raise ConfigError(
            f"training.rollouts_per_update={episodes} is not a multiple of group_size={size}: a "
            "batch holds whole groups"
        )
    name = config.algorithm.name
    for loss in _terms(algorithm.loss):
        if isinstance(loss, TokenKLLoss):
            raise ConfigError(
                f"algorithm {name!r} with a KL term needs a reference model, which a run file "
                "cannot name: set algorithm.kwargs.kl_coeff=0, or write a script that gives "
                "RolloutBatchSource scorers=[ReferenceScorer(...)]"
            )
        if isinstance(loss, OnPolicyDistillationLoss):
            raise ConfigError(
                f"algorithm {name!r} needs a teacher model, which a run file cannot name: choose "
                "another algorithm, or write a script that gives RolloutBatchSource "
                "scorers=[TeacherScorer(...)]"
            )
    if isinstance(algorithm.credit_assigner, TrackedAdvantage):
        for section, env in zip(config.env, envs, strict=True):
            if type(env).task_key is LudicEnv.task_key:
                raise ConfigError(
                    f"algorithm {name!r} tracks a value per task, and environment "
                    f"{section.kind!r} names none: define its task_key(), choose another "
                    "algorithm, or write a script that sets RolloutRequest.task_key"
                )


def _terms(loss: Any) -> Iterator[Any]:
    """A loss and those that it is made of."""
    yield loss
    for _, term in getattr(loss, "terms", ()):
        yield from _terms(term)
    if hasattr(loss, "loss"):
        yield from _terms(loss.loss)
