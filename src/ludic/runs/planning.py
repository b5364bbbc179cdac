"""What a plan rests on: a run file's sizes, settings and lengths, for which nothing is loaded or
started; and a machine's profile, measured with a run's model: passes, and steps of the engine."""

from __future__ import annotations

import asyncio
import json
import platform
import time
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from ludic.errors import ConfigError, LudicError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.sampling import SamplingConfig
from ludic.memory.plan import GIB
from ludic.memory.shape import Adapter, ModelShape
from ludic.plan.costs import Costs
from ludic.plan.profile import Measured, Profile, fit, load_profile, shape_named
from ludic.plan.search import Job, Mode
from ludic.plan.workload import Lengths, Workload
from ludic.plumbing.model_parts import base_causal_lm, vocabulary_size
from ludic.registry import ENVS
from ludic.rollouts.storage import read_rollouts
from ludic.runs.episodes import import_user_modules
from ludic.runs.locate import locate, read_run
from ludic.runs.machine import versions
from ludic.runs.memory import plan_run, shape_by_name, trainer_settings
from ludic.runs.model import algorithm_of, build_model, local_client
from ludic.runs.results.terminal import read_curve
from ludic.runs.settings import RunConfig
from ludic.sharding.world import World
from ludic.training.update.budget import host_memory, shape_of
from ludic.training.update.calibrate import synthetic_batch, update_fits
from ludic.training.update.host_optimizer import make_optimizer
from ludic.training.update.passes import Passes
from ludic.training.update.planning import Cost
from ludic.training.update.policy import Policy
from ludic.types import AgentStep, TokenTrace

_SEEN = 4096
"""How many of an earlier run's episodes are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What was given beside the run file; None: as it follows from the run, or assumed."""

    gpu: str = "h200"
    shape: str | None = None
    mode: Mode | None = None
    tokens: float | None = None
    env_s: float | None = None
    host_s: float | None = None
    prompt: int | None = None
    earlier: Path | None = None
    failures_per_gpu_hour: float = 0.0


def job_of(run: str | Path, overrides: Sequence[str], given: Given) -> tuple[Job, dict[str, str]]:
    """The run as a job for `ludic.plan`, and where what a run file does not say comes from."""
    config, modules, _ = read_run(run, overrides)
    with suppress(Exception):  # they may need what only another machine has
        import_user_modules(config, modules)
    # A plan is for GPUs, whatever this machine is.
    stated = config.model.precision or config.model.dtype
    on_gpus = {"device": None} | ({} if stated else {"precision": "bfloat16"})
    model = config.model.model_copy(update=on_gpus)
    config = config.model_copy(update={"model": model})
    shape = _shape(config, given.shape)
    profile = load_profile(given.gpu)
    training = config.training
    device = torch.device("cpu" if profile.name.startswith("cpu") else "cuda")
    own_mode: Mode = "ahead" if training.overlap else "sync"
    mode = given.mode or ("async" if config.pipeline is not None else own_mode)
    workload, origins = _workload(config, given)
    memory = plan_run(config, shape, device, int(profile["memory_gib"] * GIB))
    job = Job(
        costs=Costs(profile, shape, memory.training.adapter),
        workload=workload,
        memory=memory,
        longest=training.max_seq_len,
        budget=training.micro_token_budget,
        checkpointing=training.gradient_checkpointing,
        slots=config.slots,
        context=config.inference.max_context_tokens or training.max_seq_len,
        hosts=_hosts(config, mode),
        threaded=any(_blocks(env.kind) is not False for env in config.env),
        writes=config.logging.keep_rollouts,
        mode=mode,
        lag=max(training.max_lag, 1),
        in_order=config.pipeline.in_order if config.pipeline else True,
        steps=training.mini_batches,
        epochs=training.epochs,
        checkpoint_every=training.checkpoint_every,
        failures_per_gpu_hour=given.failures_per_gpu_hour,
        seed=config.run.seed,
    )
    if any(_blocks(env.kind) is None for env in config.env):
        origins["the environment"] = "in a thread (assumed: it cannot be imported here)"
    origins["mode"] = f"{mode}" + (" (given)" if given.mode else " (the run file)")
    return job, origins


def _hosts(config: RunConfig, mode: Mode) -> int:
    """Processes that play episodes where there is one GPU: the run's workers, or its actors."""
    if mode == "async":
        return max(config.pipeline.actors, 1) if config.pipeline else 2
    return max(config.training.workers, 1)


def _blocks(kind: str) -> bool | None:
    """Whether an environment may block, and so runs in a thread; None if it cannot be asked."""
    try:
        return bool(getattr(ENVS.get(kind), "blocking", True))
    except (LudicError, ImportError):
        return None


def _shape(config: RunConfig, published: str | None) -> ModelShape:
    """Of a configuration at hand, or of a published model."""
    if published is not None:
        return shape_named(published)
    if config.model.name == "tiny":
        return shape_of(build_model(config)[0]) or shape_named("tiny")
    return shape_by_name(config.model) or shape_named(config.model.name)


def _workload(config: RunConfig, given: Given) -> tuple[Workload, dict[str, str]]:
    training, most = config.training, config.inference.sampling.max_tokens
    most = most or training.max_seq_len
    mean = given.tokens or 0.6 * most
    text = "given" if given.tokens else "assumed: 0.6 of inference.sampling.max_tokens"
    lengths = Lengths(min(max(mean, 1.0), most), most)
    work = Workload(
        training.rollouts_per_update,
        algorithm_of(config).group_size or 1,
        lengths,
        max(training.steps, 1),
        prompt=given.prompt or 150,
        turns=1,
        env_s=given.env_s or 0.0,
        host_s=given.host_s or 0.0,
    )
    origins = {
        "tokens of a completion": f"{lengths.mean:.0f} on average, {most} at most ({text})",
        "tokens of a prompt": f"{work.prompt} ({'given' if given.prompt else 'assumed'})",
        "turns of an episode": f"1 (assumed; at most {training.max_steps})",
        "a step of the environment": f"{work.env_s:g} s ({'given' if given.env_s else 'assumed'})",
        "an episode on the host": f"{work.host_s:g} s ({'given' if given.host_s else 'assumed'})",
    }
    if given.earlier is not None:
        work = _trained(_seen(work, given.earlier), given.earlier)
        source = f"measured in {given.earlier}"
        origins["tokens that are trained on"] = f"{work.trained:.0%} of them ({source})"
        origins["tokens of a completion"] = f"{work.lengths.mean:.0f} on average ({source})"
        origins["tokens of a prompt"] = f"{work.prompt} ({source})"
        origins["turns of an episode"] = f"{work.turns} ({source})"
    return work, origins


def _seen(work: Workload, folder: Path) -> Workload:
    """Lengths as an earlier run had them: its last episodes."""
    listed = sorted((folder / "rollouts").glob("*.jsonl*")) or sorted(folder.glob("*.jsonl*"))
    # Beside rollouts lie the scores of their tokens; a run folder has its metrics, too.
    files = [f for f in listed if ".tokens." not in f.name and f.name != "metrics.jsonl"]
    episodes: deque[list[TokenTrace]] = deque(maxlen=_SEEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run that is still writing
        for rollout in (rollout for path in files[-4:] for rollout in read_rollouts(path)):
            traces = [s.trace for s in rollout.steps if isinstance(s, AgentStep) and s.trace]
            if traces:
                episodes.append(traces)
    if not episodes:
        return _logged(work, folder)
    completions = [len(trace.completion_token_ids) for traces in episodes for trace in traces]
    prompts = [len(traces[0].prompt_token_ids) for traces in episodes]
    turns = [len(traces) for traces in episodes]
    mean, most = sum(completions) / len(completions), max(completions)
    lengths = Lengths(max(mean, 1.0), max(most, 1), seen=tuple(max(n, 1) for n in completions))
    return replace(
        work,
        lengths=lengths,
        prompt=round(sum(prompts) / len(prompts)),
        turns=max(1, round(sum(turns) / len(turns))),
    )


def _metric(folder: Path, name: str) -> float | None:
    """The median of a metric over a run's updates."""
    _, values = read_curve(folder / "metrics.jsonl", name)
    return median(values) if values else None


def _logged(work: Workload, folder: Path) -> Workload:
    """Lengths as a run logged them, if it wrote no rollouts: mean and longest."""
    mean, most, row = (
        _metric(folder, f"train/{name}")
        for name in ("completion_tokens_mean", "completion_tokens_max", "item_tokens_mean")
    )
    if mean is None or most is None:
        raise ConfigError(f"{folder} has no rollouts with tokens: name a run folder that has some")
    turns = max(1, round(_metric(folder, "train/turns_mean") or 1.0))
    each, longest = max(mean / turns, 1.0), max(round(most / turns), 1)
    prompt = work.prompt if row is None or turns > 1 else max(round(row - mean), 1)
    return replace(
        work, lengths=Lengths(each, max(longest, ceil(each))), prompt=prompt, turns=turns
    )


def _trained(work: Workload, folder: Path) -> Workload:
    """How much of it an earlier run computed in its passes."""
    computed = _metric(folder, "perf/tokens_computed")
    if computed is None or not (folder / "run.json").is_file():
        return work
    settings = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    episodes = settings["training"]["rollouts_per_update"]  # perhaps fewer than are planned for
    trained = computed / episodes * work.episodes / work.trained_tokens
    return replace(work, trained=min(1.0, trained))


_TOKENS = (256, 1024)
_ROWS = (1, 8, 32)
_STEPS = (4, 20)
_PROMPT = 16


def _now(device: torch.device) -> float:
    """Of one thread on a CPU the processor's time, so that what else runs does not count."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if alone else time.perf_counter()


def measure_profile(run: str, overrides: Sequence[str] = ()) -> Profile:
    """A profile of this machine. What one device cannot tell, links and publishing, is the H200's,
    or assumed. The model's weights do not change."""
    config, weights = locate(run, overrides)
    model, tokenizer = build_model(config, weights)
    shape, device = shape_of(model), next(model.parameters()).device
    if shape is None:
        raise ConfigError(f"{config.model.name!r} does not say how large it is: use another model")
    lora = config.model.lora
    adapter = None if lora is None else Adapter(lora.rank)
    like = load_profile("h200")
    costs = Costs(like, shape, adapter)
    settings = replace(trainer_settings(config), gradient_checkpointing=False)
    loss = algorithm_of(config).loss
    passes = _passes(model, loss, settings, costs)
    steps = asyncio.run(_steps(local_client(config, model, tokenizer), costs, device))
    # One model tells its own time: what grows with its size, and what does not depend on tokens.
    others = ("crowd_s", "layer_s", "s", "width_s", "adapter_layer_s", "adapter_s")
    alone = {f"decode_{name}": 0.0 for name in others}
    silent = dict.fromkeys(("pass_element_s", "pass_adapter_s"), 0.0)
    (few, quick), (many, slow) = passes
    share = few["pass_flop_s"] / many["pass_flop_s"]
    least = max((quick - share * slow) / (1 - share), 0.0) / shape.layers
    values = fit(steps, alone) | alone | fit(passes[1:], silent) | silent
    values |= {"pass_layer_s": least, "pass_launch_s": least, "pass_launch_adapter_s": 0.0}
    if device.type == "cuda":
        values["host_gb_s"] = host_gb_s(device)
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_memory()
    values["memory_gib"] = total / GIB
    measured = like.with_figures("measured", f"ludic calibrate, {config.model.name}", **values)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    figures = {
        name: figure
        if name in values or figure.origin in ("assumed", "data sheet")
        else replace(figure, origin="measured on another machine", source=like.machine)
        for name, figure in measured.figures.items()
    }
    return Profile(
        name=f"{'gpu' if device.type == 'cuda' else 'cpu'}-{config.run.name}",
        machine=f"{kind}, {torch.get_num_threads()} threads",
        date=datetime.now(UTC).date().isoformat(),
        versions=versions(),
        figures=figures,
    )


def _passes(model: nn.Module, loss: Any, settings: Any, costs: Costs) -> list[Measured]:
    """Seconds of forward and backward, and the optimizer, the quickest of two."""
    policy, vocab = Policy(model, settings), vocabulary_size(base_causal_lm(model))
    optimizer = make_optimizer(model.named_parameters(), replace(settings, precision=None))
    device, longest = next(model.parameters()).device, min(settings.max_seq_len, 512)
    rows: list[Measured] = []
    for tokens in _TOKENS:
        cfg = replace(settings, micro_token_budget=tokens, max_seq_len=longest)
        passes = Passes(policy, loss, cfg, World(device=device), Cost(), recovers=False)
        batch = synthetic_batch(tokens, longest, 0.75, vocab)
        times = []
        for _ in range(3):
            begin = _now(device)
            if not update_fits(passes, batch, optimizer):
                raise ConfigError(f"a pass of {tokens} tokens does not fit: calibrate without it")
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(_now(device) - begin)
        features = costs.pass_features(tokens, context=longest)
        rows.append((features, min(times[1:])))
    optimizer.close()
    return rows


def host_gb_s(device: torch.device, size: int = 1 << 28) -> float:
    """GB/s between a GPU and pinned memory while copies go both ways, the best of three."""
    host_buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    gpu_buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    ways = [(gpu_buffers[0], host_buffers[0]), (host_buffers[1], gpu_buffers[1])]
    streams = [torch.cuda.Stream(device) for _ in ways]  # type: ignore[no-untyped-call]
    times = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for stream, (target, source) in zip(streams, ways, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return size / min(times) / 1e9


async def _steps(client: Any, costs: Costs, device: torch.device) -> list[Measured]:
    """Seconds of a decode step by its rows: what more of them take, the quickest of two."""
    rows: list[Measured] = []
    async with client:
        room = (client.max_context_tokens or 256) - _PROMPT
        few, many = (min(steps, room // 4 * (1 + place)) for place, steps in enumerate(_STEPS))
        for count in _ROWS:
            times = {}
            for steps in (few, many):
                tries = [await _sampled(client, count, steps, device) for _ in range(2)]
                times[steps] = min(tries)
            each = max((times[many] - times[few]) / (many - few), 1e-9)
            cached = count * (_PROMPT + (few + many) / 2)
            rows.append((costs.decode_features(count, cached), each))
    return rows


async def _sampled(client: Any, count: int, steps: int, device: torch.device) -> float:
    begin = _now(device)
    requests = [
        TokenCompletionRequest(
            "policy",
            tuple(1 + (row + place) % 7 for place in range(_PROMPT)),
            SamplingConfig(max_tokens=steps, seed=row),
            timeout_s=120.0,
            extensions={"ignore_eos": True},
        )
        for row in range(count)
    ]
    await asyncio.gather(*(client.complete_tokens(request) for request in requests))
    return _now(device) - begin
