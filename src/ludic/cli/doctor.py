"""`ludic doctor`: is everything there, and do sampler and trainer agree on the log-probs?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.markup import escape
from rich.table import Table

from ludic.cli.assemble import Policy, open_policy, requests_of
from ludic.cli.locate import locate
from ludic.cli.machine import examine
from ludic.cli.run_file import RunConfig
from ludic.cli.show import console, say
from ludic.eval import eval_requests
from ludic.rollouts import RolloutEngine
from ludic.saw import build_items
from ludic.saw.items import SAWItem
from ludic.seeding import derive_seed
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.scoring import LocalScores

EPISODES = 16
BUDGETS = {"float32": 1e-3, "bfloat16": 0.1}
"""The mean absolute difference of log-probs that is still agreement, by the weights' type."""


def doctor(run: str | None, overrides: Sequence[str]) -> None:
    """Prints what it finds; a fault is exit code 1."""
    faults = _show_machine()
    if run is not None:
        faults += asyncio.run(_compare(run, overrides))
    if faults:
        say(f"\n{faults} to put right")
        raise SystemExit(1)
    say("\nall is well")


def _show_machine() -> int:
    table = Table(box=None, pad_edge=False, show_header=False)
    findings = examine()
    for finding in findings:
        mark = "ok" if finding.ok else "[red]missing[/red]" if finding.needed else "[dim]–[/dim]"
        table.add_row(mark, finding.name, finding.found, escape(finding.advice))
    console.print(table)
    return sum(finding.needed and not finding.ok for finding in findings)


@dataclass(frozen=True)
class Gap:
    """Trainer minus sampler, over the sampled tokens of one way to sample and to score."""

    sampled: str
    scored: str
    differences: np.ndarray

    @property
    def mean(self) -> float:
        return float(np.abs(self.differences).mean())

    @property
    def largest(self) -> float:
        return float(np.abs(self.differences).max())


async def _compare(run: str, overrides: Sequence[str]) -> int:
    config, weights = locate(run, overrides)
    async with open_policy(config, weights=weights) as policy:
        gaps = await measure_gaps(config, policy)
        dtype = str(next(policy.model.parameters()).dtype).removeprefix("torch.")
    budget = BUDGETS.get(dtype, BUDGETS["bfloat16"])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("sampled", "scored", "tokens", "mean |Δ|", "max |Δ|", "mean ratio"):
        table.add_column(heading, justify="left" if heading.endswith("ed") else "right")
    for gap in gaps:
        table.add_row(
            gap.sampled,
            gap.scored,
            str(gap.differences.size),
            f"{gap.mean:.2e}",
            f"{gap.largest:.2e}",
            f"{np.exp(gap.differences).mean():.6f}",
        )
    say(f"\nlog-probs, trainer minus sampler ({dtype}; budget {budget:g} on the mean):\n")
    console.print(table)
    return sum(not gap.mean <= budget for gap in gaps)


async def measure_gaps(config: RunConfig, policy: Policy, *, episodes: int = EPISODES) -> list[Gap]:
    """Plays a few episodes one by one and all together, at the run's temperature and at others
    that may be trained on, and scores what was sampled as the trainer does, packed and alone."""
    own = policy.runtime.inference.sampling.temperature
    temperatures = [own, *(t for t in (0.7, 1.0) if t != own)] if own > 0 else [1.0]
    gaps: list[Gap] = []
    for temperature in temperatures:
        for width, how in ((1, "one by one"), (episodes, f"{episodes} at once")):
            items = await _sample(config, policy, temperature, width, episodes)
            ways = [("packed", config.training.micro_token_budget), ("alone", 1)]
            for scored, budget in ways:
                found = await LocalScores(policy.model, micro_token_budget=budget).logprobs(items)
                gaps.append(Gap(f"{how}, temperature {temperature:g}", scored, _gap(items, found)))
    return gaps


async def _sample(
    config: RunConfig, policy: Policy, temperature: float, concurrency: int, episodes: int
) -> list[SAWItem]:
    inference = policy.runtime.inference
    inference = replace(inference, sampling=replace(inference.sampling, temperature=temperature))
    request, _ = next(iter(requests_of(config, held_out=True).values()))
    rollouts = await RolloutEngine(
        runtime=replace(policy.runtime, inference=inference)
    ).generate_rollouts(
        eval_requests(request, episodes, seed=derive_seed(config.run.seed, "doctor")),
        max_steps=config.training.max_steps,
        concurrency=concurrency,
    )
    return build_items(rollouts, ConstantCredit().compute(rollouts))


def _gap(items: Sequence[SAWItem], scores: Sequence[np.ndarray]) -> np.ndarray:
    sampled = [item.attachments.behavior_logprobs for item in items]
    assert all(values is not None for values in sampled)
    return np.concatenate(scores).astype(np.float64) - np.concatenate(sampled)  # type: ignore[arg-type]
