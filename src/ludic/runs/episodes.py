"""What playing a run's episodes needs, besides a model. Imports no torch: actors may have none."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError
from ludic.inference import HFChatTemplate, InferenceSpec, ReturnSpec, SamplingConfig
from ludic.inference.client import ChatClient
from ludic.inference.templates.tool_parsers import ToolParser, get_tool_parser
from ludic.interaction import Runtime
from ludic.rollouts import RolloutEngine
from ludic.rollouts.processes import WorkerPool
from ludic.runs.settings import RunConfig


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
    config: RunConfig,
    client: ChatClient,
    tokenizer: Any,
    others: Mapping[str, Runtime] | None = None,
) -> Runtime:
    """Returns what the run's agents talk to; `others` are players that are not trained."""
    template = HFChatTemplate(tokenizer, tool_parser_of(config))
    return Runtime(client, template, config.model.name, inference_spec(config), others or {})


def rollout_engine(
    config: RunConfig, runtime: Runtime, *, seed: int = 0, workers: WorkerPool | None = None
) -> RolloutEngine:
    """Returns an engine with the run's deadlines and its policy for groups that lost a member."""
    training = config.training
    return RolloutEngine(
        runtime=runtime,
        seed=seed,
        step_timeout_s=training.step_timeout_s,
        episode_timeout_s=training.episode_timeout_s,
        lost_member=training.lost_member,
        workers=workers,
        isolated=isolated_kinds(config),
    )


def isolated_kinds(config: RunConfig) -> frozenset[str]:
    """Returns which environments the run file puts into processes of their own."""
    both = (*config.env, *config.eval.env)
    return frozenset(section.kind for section in both if section.isolation == "process")


def make_importable(folder: Path) -> None:
    """Puts `folder` on the import path, so that a run file can name modules beside it."""
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.insert(0, path)


def bring_in(config: RunConfig, modules: Path) -> None:
    """Makes what the run names importable, and imports the modules that register names for it."""
    make_importable(modules)
    for module in config.run.imports:
        try:
            import_module(module)
        except ImportError as exc:
            raise ConfigError(f"run.imports: {module!r} cannot be imported: {exc}") from exc
