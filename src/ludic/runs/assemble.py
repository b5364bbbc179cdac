"""From a run's configuration to the library's objects. All that a script would write by hand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ludic.runs.settings import ModelSection, RunConfig
from ludic.distributed import PolicyPublisher
from ludic.distributed.local import LocalPolicyPublisher
from ludic.errors import ConfigError, LudicError, MissingExtraError
from ludic.inference import HFChatTemplate, InferenceSpec, ReturnSpec, SamplingConfig
from ludic.inference.client import ChatClient
from ludic.inference.templates.tool_parsers import get_tool_parser
from ludic.interaction import Runtime
from ludic.rollouts import RolloutRequest
from ludic.seeding import derive_seed
from ludic.training import CheckpointConfig, RLAlgorithm, TrainerConfig, make_algorithm
from ludic.types import EnvSpec, ProtocolSpec


@dataclass(frozen=True)
class Policy:
    """A model that can be sampled from and, through `publisher`, trained."""

    model: nn.Module
    tokenizer: Any
    runtime: Runtime
    publisher: PolicyPublisher


def build_model(config: RunConfig, weights: Path | None = None) -> tuple[nn.Module, Any]:
    """The run's model and tokenizer; `weights` is a trained checkpoint's `model` folder."""
    section = config.model
    if section.name == "tiny":
        from ludic.inference.tiny import tiny_model, tiny_tokenizer

        options = dict(section.kwargs)
        seed = derive_seed(config.run.seed, "model")
        try:
            tokenizer = tiny_tokenizer(words=options.pop("words", ()))
            model: nn.Module = tiny_model(seed, vocab_size=len(tokenizer), **options)
        except Exception as exc:  # of many kinds, but about these arguments: there are no others
            raise ConfigError(f"model.kwargs does not fit the tiny model: {exc}") from exc
    else:
        model, tokenizer = _from_pretrained(section)
    if section.lora is not None:
        model = _with_adapter(model, section)
    if weights is not None:
        load_weights(model, weights)
    return model.to(check_device(section)), tokenizer


def load_weights(model: nn.Module, folder: Path) -> None:
    """Takes the weights that a checkpoint holds; they must be those of this model."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no weights: has the run saved a checkpoint yet?")
    state = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if hasattr(model, "peft_config"):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, state)
        return
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        names = [*unexpected, *(set(missing) - tied)]
        raise ConfigError(f"{folder} is of another model: {names[0]!r} does not fit")


def _from_pretrained(section: ModelSection) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, None: "auto"}[section.dtype]
    options: dict[str, Any] = {"revision": section.revision} if section.revision else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(section.name, **options)
        model = AutoModelForCausalLM.from_pretrained(
            section.name, dtype=dtype, **options, **section.kwargs
        )
    except (OSError, ValueError) as exc:
        reason = str(exc).strip().splitlines()[0]
        raise ConfigError(
            f'model.name={section.name!r} is neither "tiny" nor a model that can be loaded from '
            f"a folder or the hub: {reason}"
        ) from exc
    except TypeError as exc:
        raise ConfigError(f"model.kwargs does not fit {section.name!r}: {exc}") from exc
    return model, tokenizer


def _with_adapter(model: nn.Module, section: ModelSection) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as exc:
        raise MissingExtraError("peft", "peft") from exc
    assert section.lora is not None
    adapter = LoraConfig(
        r=section.lora.rank,
        lora_alpha=section.lora.alpha,
        target_modules=section.lora.target_modules,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with configuring("model.lora"):
        wrapped: nn.Module = get_peft_model(model, adapter)
        return wrapped


def check_device(section: ModelSection) -> torch.device:
    """Where the model is put; raises where this machine has no such device."""
    name = section.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"model.device={name!r} is no device that torch knows") from exc
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"model.device={name!r}, but this machine has no GPU that torch can use: "
            "set model.device=cpu"
        )
    return device


def inference_spec(
    config: RunConfig, *, temperature: float | None = None, trained_on: bool = True
) -> InferenceSpec:
    """The run's sampling settings, at another temperature if asked. What is `trained_on` has the
    ids that truncated sampling kept, since the trainer needs them."""
    values = config.inference.sampling.model_dump()
    values["stop"] = tuple(values["stop"])
    if temperature is not None:
        values["temperature"] = temperature
    sampling = SamplingConfig(**values)
    return InferenceSpec(sampling, ReturnSpec(kept_ids=trained_on and sampling.truncates))


@asynccontextmanager
async def open_policy(
    config: RunConfig, *, weights: Path | None = None, folder: Path | None = None
) -> AsyncIterator[Policy]:
    """Model, client and publisher, closed at the end. `folder` is where a vLLM server that has
    to be started finds the model."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    model, tokenizer = build_model(config, weights)
    parser = get_tool_parser(config.model.tool_parser) if config.model.tool_parser else None
    template = HFChatTemplate(tokenizer, parser)
    async with AsyncExitStack() as stack:
        client: ChatClient
        publisher: PolicyPublisher
        if config.inference.backend == "local":
            client, publisher = await _local(config, model, tokenizer, stack)
        else:
            from ludic.runs.vllm_backend import open_vllm

            client, publisher = await open_vllm(config, model, tokenizer, stack, folder)
        runtime = Runtime(client, template, config.model.name, inference_spec(config))
        yield Policy(model, tokenizer, runtime, publisher)


async def _local(
    config: RunConfig, model: nn.Module, tokenizer: Any, stack: AsyncExitStack
) -> tuple[ChatClient, PolicyPublisher]:
    from ludic.inference import LocalChatClient

    client = LocalChatClient(
        model,
        tokenizer,
        max_slots=config.inference.slots,
        max_context_tokens=config.inference.max_context_tokens,
        deterministic=config.inference.deterministic,
    )
    await stack.enter_async_context(client)
    return client, LocalPolicyPublisher(client)


def requests_of(
    config: RunConfig, *, held_out: bool = False
) -> Mapping[str, tuple[RolloutRequest, float]]:
    """One request per environment of the run, with its share, by name; `held_out`: of its
    evaluation, which may have an environment and a protocol of its own."""
    envs, part = config.env, config.protocol
    if held_out:
        envs, part = config.eval.env or envs, config.eval.protocol or part
    protocol = ProtocolSpec(part.kind, part.kwargs)
    found: dict[str, tuple[RolloutRequest, float]] = {}
    for section in envs:
        name = section.kind
        while name in found:
            name += "+"
        request = RolloutRequest(EnvSpec(section.kind, section.kwargs), protocol)
        found[name] = (request, section.weight)
    return found


def algorithm_of(config: RunConfig) -> RLAlgorithm:
    """The run's algorithm; arguments that it does not take are a `ConfigError`."""
    section = config.algorithm
    with configuring(f"algorithm {section.name!r} with {section.kwargs}"):
        return make_algorithm(section.name, **section.kwargs)


def trainer_config(config: RunConfig, stage: Literal["sft", "rl"], folder: Path) -> TrainerConfig:
    """How a stage is trained; `folder` is the run's. The supervised stage takes each batch once,
    at a learning rate that falls to a tenth."""
    training, rl = config.training, stage == "rl"
    steps, rate, final_ratio = training.steps, training.learning_rate, training.final_lr_ratio
    schedule = training.schedule
    if not rl:
        assert config.sft is not None
        steps, rate, final_ratio = config.sft.steps, config.sft.learning_rate, 0.1
        schedule = "linear"
    every = training.checkpoint_every or max(steps, 1)
    return TrainerConfig(
        learning_rate=rate,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        schedule=schedule,
        total_steps=steps if schedule != "constant" else None,
        final_lr_ratio=final_ratio,
        warmup_steps=training.warmup_steps if rl else 0,
        max_seq_len=training.max_seq_len,
        micro_token_budget=training.micro_token_budget,
        epochs=training.epochs if rl else 1,
        mini_batches=training.mini_batches if rl else 1,
        overlap=training.overlap and rl,
        gradient_checkpointing=training.gradient_checkpointing,
        seed=derive_seed(config.run.seed, stage),
        checkpoint=CheckpointConfig(
            folder / "checkpoints" / stage, every=every, keep=training.keep_checkpoints
        ),
        run_dir=folder if rl else folder / stage,
        eval_every=config.eval.every or None,
    )


@contextmanager
def configuring(what: str) -> Iterator[None]:
    """What a constructor says of its arguments is a `ConfigError` about `what`."""
    try:
        yield
    except LudicError:
        raise
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{what}: {exc}") from exc


def load_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"{name!r} is no function as module:function: {exc}") from exc
    if not callable(function):
        raise ConfigError(f"{name!r} is not a function")
    return function  # type: ignore[no-any-return]


def make_importable(folder: Path) -> None:
    """Lets a run file name modules that lie beside it."""
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
