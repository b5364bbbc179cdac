"""Do sampler and trainer agree? Measures the difference of their log-probs.

`run_doctor` works for any client that samples from the model. Its rows say how far the sampler's
log-probs lie from those that the trainer computes for the same tokens, setting by setting; a row
over its budget means that training would follow a policy that nobody sampled from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from ludic.distributed.interfaces import PolicyPublisher
from ludic.distributed.vllm.canary import MismatchBudget, is_sharded
from ludic.errors import ConfigError, RequestRejectedError
from ludic.inference.client import ChatClient, TokenCompletionRequest, policy_version
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.plumbing.precision import Precision
from ludic.runs.check_episodes import check_programs
from ludic.runs.locate import locate
from ludic.runs.model import precision_of
from ludic.runs.playing import open_policy
from ludic.saw.items import SampleAttachments, SAWItem
from ludic.seeding import derive_seed
from ludic.sharding.weights import ModelWeights
from ludic.training.batching.scoring import LocalScores, Scores

_TEXTS = (
    "What is 17 + 25?",
    "Name three rivers and the seas they flow into.",
    "def fibonacci(n):\n    ",
    "The first move of the game was",
    "Übung macht den Meister: translate, then explain in one sentence.",
    "x = 3, y = 4. The distance from the origin is",
    "Once upon a time, in a village between two mountains, there lived an old clockmaker who",
    '{"tool": "search", "arguments": {"query": "',
)


@dataclass(frozen=True, slots=True)
class DoctorRow:
    """One comparison. If there was nothing to compare, `note` says why."""

    setting: str
    tokens: int
    mean: float
    max: float
    budget: MismatchBudget
    note: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.note) or self.budget.allows(self.mean, self.max)


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All comparisons for one model and one client."""

    rows: tuple[DoctorRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def table(self) -> str:
        """Returns the rows as an aligned table."""
        lines = [f"{'setting':<34} {'tokens':>6} {'mean':>9} {'max':>9} {'budget (mean, max)':>19}"]
        for row in self.rows:
            if row.note:
                lines.append(f"{row.setting:<34} {row.note}")
                continue
            budget = f"{row.budget.mean:g}, {row.budget.max:g}"
            verdict = "ok" if row.ok else "OVER THE BUDGET"
            lines.append(
                f"{row.setting:<34} {row.tokens:>6} {row.mean:>9.2g} {row.max:>9.2g} "
                f"{budget:>19}  {verdict}"
            )
        return "\n".join(lines)


async def run_doctor(
    model: nn.Module,
    tokenizer: Any,
    client: ChatClient,
    *,
    model_name: str = "policy",
    publisher: PolicyPublisher | None = None,
    budget: MismatchBudget | None = None,
    precision: Precision | None = None,
    requests: int = 16,
    max_tokens: int = 32,
    temperatures: Sequence[float] = (1.0, 0.7),
    timeout_s: float = 300.0,
) -> DoctorReport:
    """Samples from `client` and scores with `model`, whose weights the client must have.

    With a publisher, it also publishes changed weights, measures, and publishes the old ones back:
    the client's version goes up by two. Not for use while a run trains.
    """
    if is_sharded(model):
        raise ConfigError("the doctor needs the whole model on one rank: load it without FSDP2")
    if requests < 2:
        raise ConfigError(f"run_doctor(requests={requests}): at least 2, to compare with one")
    room = client.max_context_tokens
    if room is not None:  # half of a small context is left for the answers
        max_tokens = min(max_tokens, max(room // 2, 1))
    checkup = _Checkup(
        client=client,
        name=model_name,
        prompts=tuple(
            ids if room is None else ids[: max(room - max_tokens, 1)]
            for ids in _prompts(tokenizer, requests)
        ),
        max_tokens=max_tokens,
        timeout_s=timeout_s,
        scores=LocalScores(model, precision=precision),
        budget=budget or MismatchBudget.for_dtype(precision or next(model.parameters()).dtype),
    )
    rows = [await checkup.compare("one request at a time", SamplingConfig(), together=False)]
    for temperature in temperatures:
        name = f"{requests} at once, temperature {temperature:g}"
        rows.append(await checkup.compare(name, SamplingConfig(temperature=temperature)))
    rows.append(await checkup.compare("top-k 20", SamplingConfig(top_k=20)))
    rows.append(await checkup.compare("top-p 0.9, top-k 50", SamplingConfig(top_p=0.9, top_k=50)))
    rows.append(await checkup.packed_against_single())
    if publisher is not None:
        first = await policy_version(client) or 0
        try:
            async with _changed(model, publisher):
                await publisher.publish(ModelWeights(model), first + 1)
                rows.append(
                    await checkup.compare("after a publish of changed weights", SamplingConfig())
                )
        finally:  # whatever happened, servers that others use get their weights back
            await asyncio.shield(publisher.publish(ModelWeights(model), first + 2))
        rows.append(await checkup.compare("after a publish of the old ones", SamplingConfig()))
    return DoctorReport(tuple(rows))


async def examine_run(run: str, overrides: Sequence[str] = ()) -> DoctorReport:
    """`run_doctor` with a run's model, client and publisher, also at the run's own temperature."""
    config, weights = locate(run, overrides)
    check_programs(config)
    async with open_policy(config, weights=weights) as policy:
        own = policy.runtime.inference.sampling
        return await run_doctor(
            policy.model,
            policy.tokenizer,
            policy.client,
            model_name=policy.runtime.model,
            publisher=policy.publisher,
            precision=precision_of(config),
            max_tokens=own.max_tokens or 32,
            temperatures=sorted({own.temperature, 0.7, 1.0} - {0.0}),
        )


@dataclass(frozen=True, slots=True)
class _Checkup:
    """What all rows have in common."""

    client: ChatClient
    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    timeout_s: float
    scores: LocalScores
    budget: MismatchBudget

    async def compare(
        self, setting: str, sampling: SamplingConfig, *, together: bool = True
    ) -> DoctorRow:
        """Samples, scores the same tokens as the trainer would, and measures."""
        try:
            items = await self._sample(setting, sampling, together)
        except RequestRejectedError as exc:
            if not sampling.truncates:
                raise
            # A backend that cannot say which ids it kept is refused by the trainer as well.
            why = str(exc).partition(":")[0]
            return DoctorRow(setting, 0, 0.0, 0.0, self.budget, f"cannot be trained on: {why}")
        ours = await (self.scores.logprobs if together else self._one_by_one)(items)
        return self._row(setting, ours, [item.attachments.behavior_logprobs for item in items])

    async def packed_against_single(self) -> DoctorRow:
        """The trainer against itself: many sequences in one pass, and each alone."""
        items = await self._sample("packed", SamplingConfig(), True)
        packed, single = await self.scores.logprobs(items), await self._one_by_one(items)
        return self._row("trainer: packed against single", packed, single)

    async def _one_by_one(self, items: Sequence[SAWItem]) -> Scores:
        return [(await self.scores.logprobs([item]))[0] for item in items]

    def _row(self, setting: str, ours: Sequence[Any], theirs: Sequence[Any]) -> DoctorRow:
        gaps = np.abs(np.concatenate(list(ours)) - np.concatenate(list(theirs)))
        return DoctorRow(setting, gaps.size, float(gaps.mean()), float(gaps.max()), self.budget)

    async def _sample(
        self, setting: str, sampling: SamplingConfig, together: bool
    ) -> list[SAWItem]:
        async def one(index: int) -> SAWItem:
            seed = derive_seed(0, "doctor", setting, index)
            seeded = replace(sampling, max_tokens=self.max_tokens, seed=seed)
            returns = ReturnSpec(kept_ids=sampling.truncates)
            response = await self.client.complete_tokens(
                TokenCompletionRequest(
                    self.name, self.prompts[index], seeded, returns, timeout_s=self.timeout_s
                )
            )
            trace = response.trace
            if trace is None or trace.completion_logprobs is None:
                raise ConfigError(
                    f"{type(self.client).__name__} returns no token ids with log-probs: nothing "
                    "that it samples can be trained on"
                )
            return _item(trace, sampling.temperature)

        everyone = range(len(self.prompts))
        if not together:
            return [await one(index) for index in everyone]
        return list(await asyncio.gather(*(one(index) for index in everyone)))


def _prompts(tokenizer: Any, count: int) -> tuple[tuple[int, ...], ...]:
    """Texts of different kinds and lengths, so that requests in one batch differ."""
    texts = (f"{i}. " * (i // len(_TEXTS)) + _TEXTS[i % len(_TEXTS)] for i in range(count))
    return tuple(tuple(map(int, tokenizer.encode(text))) for text in texts)


def _item(trace: Any, temperature: float) -> SAWItem:
    ids = np.array(trace.token_ids, dtype=np.int64)
    actions = np.zeros(ids.size, dtype=np.int8)
    actions[len(trace.prompt_token_ids) :] = 1
    kept = trace.kept_token_ids
    attachments = SampleAttachments(
        behavior_logprobs=np.array(trace.completion_logprobs, dtype=np.float32),
        kept_token_ids=None if kept is None else [np.array(row, dtype=np.int64) for row in kept],
    )
    return SAWItem(
        ids, np.ones_like(actions), actions, 1.0, attachments=attachments, temperature=temperature
    )


@asynccontextmanager
async def _changed(model: nn.Module, publisher: PolicyPublisher) -> AsyncIterator[None]:
    """Inside, every weight that is trained is a little different; afterwards each is what it was,
    to the bit.

    Enough for every log-prob to show it, and too little to ruin a trained model, whose log-probs
    would then hang on the last bit of bfloat16.
    """
    trained = [p for p in model.parameters() if p.requires_grad] or list(model.parameters())
    saved = [(p, p.detach().clone()) for p in trained]
    async with publisher.updating():
        with torch.no_grad():
            for parameter, old in saved:
                # Half of a new adapter is zero, and would stay so.
                parameter.add_(old.flip(0) if old.any() else torch.ones_like(old), alpha=0.02)
    try:
        yield
    finally:
        async with publisher.updating():
            with torch.no_grad():
                for parameter, old in saved:
                    parameter.copy_(old)
