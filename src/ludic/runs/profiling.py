"""Measures this machine with a run's model, for `ludic plan`: passes, and steps of the engine."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from ludic.errors import ConfigError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.sampling import SamplingConfig
from ludic.memory.plan import GIB
from ludic.memory.shape import Adapter
from ludic.plan.costs import Costs
from ludic.plan.profile import Measured, Profile, fit, load_profile
from ludic.plumbing.model_parts import base_causal_lm, vocabulary_size
from ludic.runs.locate import locate
from ludic.runs.machine import installed
from ludic.runs.memory import trainer_settings
from ludic.runs.model import algorithm_of, build_model, local_client
from ludic.runs.storage import PACKAGES
from ludic.sharding.world import World
from ludic.training.update.budget import host_memory, shape_of
from ludic.training.update.calibrate import synthetic_batch, update_fits
from ludic.training.update.host_optimizer import make_optimizer
from ludic.training.update.passes import Passes
from ludic.training.update.planning import Cost
from ludic.training.update.policy import Policy

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
    found = fit(steps, alone) | alone | fit(passes[1:], silent) | silent
    found |= {"pass_layer_s": least, "pass_launch_s": least, "pass_launch_adapter_s": 0.0}
    if device.type == "cuda":
        found["host_gb_s"] = host_gb_s(device)
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_memory()
    found["memory_gib"] = total / GIB
    measured = like.with_figures("measured", f"ludic calibrate, {config.model.name}", **found)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    figures = {
        name: figure
        if name in found or figure.origin in ("assumed", "data sheet")
        else replace(figure, origin="measured on another machine", source=like.machine)
        for name, figure in measured.figures.items()
    }
    versions = {package: version for package in PACKAGES if (version := installed(package))}
    return Profile(
        name=f"{'gpu' if device.type == 'cuda' else 'cpu'}-{config.run.name}",
        machine=f"{kind}, {torch.get_num_threads()} threads",
        date=datetime.now(UTC).date().isoformat(),
        versions={"python": platform.python_version(), **versions},
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
    there = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    here = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    ways = [(here[0], there[0]), (there[1], here[1])]
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
