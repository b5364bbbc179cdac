"""A run's episodes: which there are, what playing them needs besides a model, and the reports of
those that are held out. Imports no torch: actors may have none."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import structs

from ludic.envs import build_env
from ludic.envs.runner import close_env
from ludic.errors import ConfigError
from ludic.eval import EvalReport, RolloutEvaluator, eval_requests, reward_above
from ludic.inference import HFChatTemplate, InferenceSpec, ReturnSpec, SamplingConfig
from ludic.inference.client import ChatClient
from ludic.inference.templates.tool_parsers import ToolParser, get_tool_parser
from ludic.interaction import Runtime
from ludic.plumbing.given import PREFIX
from ludic.rollouts import RolloutEngine, RolloutRequest
from ludic.rollouts.engine import ProgressCallback
from ludic.rollouts.processes import WorkerPool
from ludic.runs.settings import EnvSection, RunConfig
from ludic.runs.settings.parts import teachers_by_env
from ludic.saw.statistics import ENV
from ludic.seeding import derive_seed
from ludic.types import AgentID, EnvSpec, ProtocolSpec


def inference_spec(
    config: RunConfig, *, temperature: float | None = None, trained_on: bool = True
) -> InferenceSpec:
    """Returns the run's sampling settings, optionally at another temperature. With `trained_on`,
    completions carry the ids that truncated sampling kept, which the trainer needs."""
    values = config.inference.sampling.model_dump()
    values |= {key: tuple(values[key]) for key in ("stop", "stop_token_ids")}
    if temperature is not None:
        values["temperature"] = temperature
    sampling = SamplingConfig(**values)
    return InferenceSpec(
        sampling, ReturnSpec(kept_ids=trained_on and sampling.truncates, text=False)
    )


def with_template(config: RunConfig, tokenizer: Any) -> Any:
    """Returns the tokenizer with the run's chat template, if it names one, in place of its own."""
    name = config.model.chat_template
    if name is None:
        return tokenizer
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"model.chat_template={name!r} cannot be read: {exc}") from exc
    tokenizer = copy.deepcopy(tokenizer)  # which may be a script's
    tokenizer.chat_template = text
    return tokenizer


def tool_parser_of(config: RunConfig) -> ToolParser | None:
    """Returns the parser of the model's tool calls, if the run names one."""
    name = config.model.tool_parser
    return get_tool_parser(name) if name else None


def runtime_of(
    config: RunConfig, client: ChatClient, tokenizer: Any, others: Mapping[str, Runtime] = {}
) -> Runtime:
    """Returns what the run's agents talk to; `others` are players that are not trained."""
    template = HFChatTemplate(tokenizer, tool_parser_of(config))
    return Runtime(client, template, config.model.name, inference_spec(config), others)


def rollout_engine(
    config: RunConfig, runtime: Runtime, *, seed: int = 0, workers: WorkerPool | None = None
) -> RolloutEngine:
    """Returns an engine with the run's deadlines and its policy for groups that lost a member."""
    training, envs = config.training, (*config.env, *config.eval.env)
    return RolloutEngine(
        runtime=runtime,
        seed=seed,
        step_timeout_s=training.step_timeout_s,
        episode_timeout_s=training.episode_timeout_s,
        lost_member=training.lost_member,
        workers=workers,
        isolated=frozenset(env.kind for env in envs if env.isolation == "process"),
    )


def make_importable(folder: Path) -> None:
    """Puts `folder` on the import path, so that a run file can name modules beside it."""
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.insert(0, path)


def import_user_modules(config: RunConfig, modules: Path) -> None:
    """Makes what the run names importable, and imports the modules that register names for it."""
    make_importable(modules)
    for module in config.run.imports:
        try:
            import_module(module)
        except ImportError as exc:
            raise ConfigError(f"run.imports: {module!r} cannot be imported: {exc}") from exc


TEACHER = "teacher"
"""The key in the `meta` of a request and its rollouts that names their teacher."""


def requests_of(
    config: RunConfig, *, held_out: bool = False
) -> Mapping[str, tuple[RolloutRequest, float]]:
    """Returns one request per environment of the run, with its share, by name. With `held_out`,
    those of the evaluation, which may have other environments and another protocol."""
    envs, part = config.env, config.protocol
    if held_out:
        envs, part = config.eval.env or envs, config.eval.protocol or part
    protocol = ProtocolSpec(part.kind, part.kwargs)
    sections: dict[str, EnvSection] = {}
    for section in envs:
        # The same for an object as for its place: seeds may depend on it.
        name = section.name or section.kind.removeprefix(PREFIX)
        while name in sections:
            name += "+"
        sections[name] = section
    teachers = {} if held_out else teachers_by_env(config.teacher, list(sections))
    return {
        name: (
            RolloutRequest(
                EnvSpec(section.kind, section.kwargs),
                protocol,
                meta={
                    **({ENV: name} if len(sections) > 1 else {}),
                    **({TEACHER: teachers[name]} if name in teachers else {}),
                },
            ),
            section.weight,
        )
        for name, section in sections.items()
    }


def seats_of(spec: EnvSpec) -> tuple[AgentID, ...]:
    """The agents of an environment, which is built for that and closed."""
    env = build_env(spec)
    try:
        return tuple(env.agent_ids)
    finally:
        close_env(env, spec.kind)


def eval_plan(config: RunConfig) -> list[RolloutRequest]:
    """Returns the run's held-out episodes. They depend on its evaluation seed alone."""
    mix = list(requests_of(config, held_out=True).values())
    episodes, samples = config.eval.episodes, config.eval.samples_per_task
    plan: list[RolloutRequest] = []
    for index, (request, _) in enumerate(mix):
        if episodes == "all":
            count = samples * rows_of(request.env)
        else:
            tasks = range(index * samples, episodes, len(mix) * samples)  # where each begins
            count = min(len(tasks) * samples, episodes - len(plan))
        seed = derive_seed(config.eval.seed, "env", index)
        requests = eval_requests(request, count, seed=seed, samples_per_task=samples)
        if episodes == "all":
            requests = [_with_row(one, i // samples) for i, one in enumerate(requests)]
        plan += requests
    return plan


def _with_row(request: RolloutRequest, row: int) -> RolloutRequest:
    spec = EnvSpec(request.env.kind, {**request.env.kwargs, "index": row})
    return structs.replace(request, env=spec)


def rows_of(spec: EnvSpec) -> int:
    """How many rows the data of an environment has, which is built for that and closed."""
    env = build_env(spec)
    try:
        count = getattr(env, "num_rows", None)
        if count is None:
            raise ConfigError(
                f'eval.episodes="all" plays each row of a dataset once, but {spec.kind!r} has '
                "no rows: set a number"
            )
        if getattr(env, "index", None) is not None:
            raise ConfigError(
                f'eval.episodes="all" plays each row of a dataset once, but {spec.kind!r} has '
                "one, by its index: set eval.episodes to a number, or leave out index"
            )
        return int(count())
    finally:
        close_env(env, spec.kind)


def eval_engine(config: RunConfig, runtime: Runtime) -> RolloutEngine:
    """Returns an engine that samples as the evaluation does, perhaps at another temperature."""
    inference = inference_spec(config, temperature=config.eval.temperature, trained_on=False)
    return rollout_engine(config, replace(runtime, inference=inference))


async def evaluate_policy(
    config: RunConfig, runtime: Runtime, *, name: str, on_progress: ProgressCallback | None = None
) -> EvalReport:
    """Plays the held-out episodes with the policy as it is now."""
    above = config.eval.success_above
    evaluator = RolloutEvaluator(
        eval_engine(config, runtime),
        eval_plan(config),
        max_steps=config.training.max_steps,
        name=name,
        concurrency=config.concurrency,
        on_progress=on_progress,
        success=None if above is None else reward_above(above),
        outcomes=config.eval.outcomes,
    )
    return await evaluator.evaluate()
