"""Log-probs of a second model, attached to a batch: a reference to stay near, or a teacher.

A `TokenScores` computes a model's log-probs of the items' action tokens, with the temperature and
kept ids of the sampling, as the trainer does. The model is local, behind a client, or one of
several by name. `ReferenceScorer` and `TeacherScorer` attach the scores to a batch;
`ScoredBatchSource(source, scorers)` does so for every batch of a source.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ludic.errors import BatchError, ConfigError, DeadlineError, NotTrainableError, UnknownNameError
from ludic.inference.client import ChatClient, TokenCompletionRequest
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.plumbing.precision import Precision, check_precision, float32_products
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch, SAWItem
from ludic.training.batching.ahead import WrappedSource
from ludic.training.batching.source import GivesBatches

if TYPE_CHECKING:
    from torch import nn

Scores = list[NDArray[np.float32]]
_USUAL_LENGTH = 2048


class TokenScores(Protocol):
    """A model's log-probs of items' action tokens."""

    async def logprobs(self, items: Sequence[SAWItem]) -> Scores:
        """One array per item, with one log-prob per action token."""
        ...


class LocalScores:
    """Scores with a model in this process, through the trainer's own arithmetic.

    `model` is a frozen causal LM. With `without_adapter` it is a PEFT model whose base is the
    reference: its adapter is off while it scores, so nobody may sample from it at the same time.
    `precision` is as in `TrainerConfig`. A model that drops units is refused when it scores.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        micro_token_budget: int = 16384,
        without_adapter: bool = False,
        precision: Precision | None = None,
    ) -> None:
        from ludic.sharding.world import World
        from ludic.training.config import TrainerConfig
        from ludic.training.update.policy import Policy
        from ludic.training.update.recovery import Recovery

        check_precision(precision, model, "LocalScores")
        self.policy = Policy(model, TrainerConfig(precision=precision))
        world = World(device=next(self.policy.parameters()).device)
        self._recovery = Recovery(self.policy, world, micro_token_budget)
        self.without_adapter = without_adapter
        self._checked = 0
        self._adapter_off: Callable[[], AbstractContextManager[Any]] = (
            partial(_adapter_off, model) if without_adapter else nullcontext
        )
        self._check(_USUAL_LENGTH)

    def _check(self, longest: int) -> None:
        """Tries how rows of up to `longest` tokens pack, where longer ones are new."""
        from ludic.training.update.checks import check_packing

        if longest > self._checked:
            self._checked = 1 << (longest - 1).bit_length()  # so that few lengths are tried
            with float32_products(self.policy.precision), self._adapter_off():
                check_packing(self.policy, next(self.policy.parameters()).device, self._checked)

    async def logprobs(self, items: Sequence[SAWItem]) -> Scores:
        scored = asyncio.ensure_future(asyncio.to_thread(self._score, items))
        try:
            return await asyncio.shield(scored)
        finally:  # also for whoever gives up: the adapter is on again when this returns
            await asyncio.wait([scored])

    def _score(self, items: Sequence[SAWItem]) -> Scores:
        from ludic.plumbing.model_parts import active_dropout
        from ludic.training.update.packing import lay_out
        from ludic.training.update.planning import plan_micro_batches
        from ludic.training.update.scores import score_layout

        off = "lora_dropout" if self.without_adapter else None  # without its adapter, unused
        if active := active_dropout(self.policy.model, but=off):
            raise ConfigError(
                f"dropout is active in {active}: its scores would be random. Call model.eval(), or "
                "set the probability to 0"
            )
        layout = lay_out(make_batch(items))
        longest = max(p.input_ids.size for p in layout.packed)
        self._check(longest)
        (plan,) = plan_micro_batches(
            layout,
            micro_token_budget=max(self._recovery.budget, longest),
            longest_packed=self.policy.longest_packed,
            shares=self.policy.shares,
        )
        with self._adapter_off():
            return score_layout(self._recovery, layout, [(m, True) for m in plan if m])


@contextmanager
def _adapter_off(model: Any) -> Iterator[None]:
    """PEFT's own, behind which parts of the adapter that were frozen are trained again."""
    parameters = list(model.parameters())
    trained = [parameter.requires_grad for parameter in parameters]
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter, was_trained in zip(parameters, trained, strict=True):
            parameter.requires_grad_(was_trained)


@dataclass(frozen=True, slots=True)
class ClientScores:
    """Scores with any `ChatClient` that returns `prompt_logprobs`: a teacher behind a server.

    Most servers report prompt log-probs at temperature 1, whatever the request says; `tempered`
    says that this one applies the request's temperature. Without it, items sampled at another
    temperature are refused. Items from truncated sampling are always refused, because no server
    accepts kept ids.

    A server can score a prompt only if one more token fits into its context. In a row that fills
    the context, the last token gets the sampler's own log-prob.
    """

    client: ChatClient
    model: str
    concurrency: int = 8
    timeout_s: float = 120.0
    tempered: bool = False

    async def logprobs(self, items: Sequence[SAWItem]) -> Scores:
        slots = asyncio.Semaphore(self.concurrency)

        async def one(item: SAWItem) -> NDArray[np.float32]:
            async with slots:
                return await self._score(item)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(item)) for item in items]
        except ExceptionGroup as failed:  # the first cause is clearer than the group
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _score(self, item: SAWItem) -> NDArray[np.float32]:
        where = f"rollout {item.rollout_id!r}"
        kept_ids = item.attachments.kept_token_ids
        if kept_ids is not None and any(len(ids) for ids in kept_ids):
            raise NotTrainableError(
                f"{where} was sampled with truncation, which a server cannot reproduce: use a "
                "LocalScores, or sample without top-p, top-k and min-p"
            )
        if item.temperature != 1.0 and not self.tempered:
            raise NotTrainableError(
                f"{where} was sampled at temperature {item.temperature}, and {self.model!r} is "
                "scored at 1: sample at 1, use a LocalScores, or set tempered=True for a server "
                "that applies the temperature to prompt log-probs"
            )
        shown = np.asarray(item.attention_mask, dtype=bool)
        actions = np.flatnonzero(np.asarray(item.action_mask, dtype=bool)[shown])
        ids = np.asarray(item.input_ids)[shown].tolist()
        last = self._unscored(item, len(ids))
        if last is not None:
            ids = ids[:-1]
        request = TokenCompletionRequest(
            self.model,
            tuple(ids),
            SamplingConfig(temperature=item.temperature, max_tokens=1),
            ReturnSpec(logprobs=False, prompt_logprobs=True),
            timeout_s=self.timeout_s,
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self.client.complete_tokens(request)
        except TimeoutError as exc:
            raise DeadlineError(f"the scores of {where}", repr(self.model), self.timeout_s) from exc
        scores = response.info.get("prompt_logprobs")
        if scores is None or len(scores) != len(ids):
            got = "none" if scores is None else len(scores)
            raise BatchError(
                f"{where}: {got} prompt log-probs for {len(ids)} tokens; the client must answer "
                'ReturnSpec(prompt_logprobs=True) in info["prompt_logprobs"]'
            )
        if last is not None:
            scores = [*scores, last]
        values = [scores[position] for position in actions]
        if any(value is None for value in values):
            raise BatchError(f"{where}: an action token came back without a log-prob")
        return np.array(values, dtype=np.float32)

    def _unscored(self, item: SAWItem, length: int) -> float | None:
        """The value used for the log-prob of a last token that does not fit; None if all fit."""
        limit = self.client.max_context_tokens
        if limit is None or length < limit:
            return None
        sampled = item.attachments.behavior_logprobs
        if length == limit and not item.action_mask[-1]:
            return math.nan  # not an action, so never used
        if length > limit or sampled is None:
            raise BatchError(
                f"rollout {item.rollout_id!r} has {length} tokens, and {self.model!r} scores up to "
                f"{limit - 1}: start it with a context of at least {length + 1}"
            )
        return float(sampled[-1])


@dataclass(frozen=True, slots=True)
class RoutedScores:
    """Several teachers: each item is scored by the one that `route` names, by default the
    rollout's `meta["teacher"]`."""

    models: Mapping[str, TokenScores]
    route: Callable[[SAWItem], str] = lambda item: str(item.meta.get("teacher"))

    async def logprobs(self, items: Sequence[SAWItem]) -> Scores:
        places: dict[str, list[int]] = {}
        for position, item in enumerate(items):
            name = self.route(item)
            if name not in self.models:
                raise UnknownNameError(
                    f"teacher of rollout {item.rollout_id!r},", name, self.models
                )
            places.setdefault(name, []).append(position)
        scores: Scores = [np.empty(0, dtype=np.float32)] * len(items)
        for name, members in places.items():
            answers = await self.models[name].logprobs([items[m] for m in members])
            for member, values in zip(members, answers, strict=True):
                scores[member] = values
        return scores


@dataclass(frozen=True, slots=True)
class ReferenceScorer:
    """Attaches the reference's log-probs, for `TokenKLLoss` and `KLInReward`."""

    reference: TokenScores

    async def score(self, batch: SAWBatch) -> SAWBatch:
        """The batch with `reference_logprobs` on every item."""
        return await _attach(batch, self.reference, "reference_logprobs")


@dataclass(frozen=True, slots=True)
class TeacherScorer:
    """Attaches the teacher's log-probs, for `make_opd`."""

    teacher: TokenScores

    async def score(self, batch: SAWBatch) -> SAWBatch:
        """The batch with `teacher_logprobs` on every item."""
        return await _attach(batch, self.teacher, "teacher_logprobs")


async def _attach(batch: SAWBatch, model: TokenScores, name: str) -> SAWBatch:
    if not batch.items:
        return batch
    items = []
    for item, scores in zip(batch.items, await model.logprobs(batch.items), strict=True):
        if not np.isfinite(scores).all():
            raise BatchError(f"rollout {item.rollout_id!r}: its {name} are not all finite")
        changes: dict[str, Any] = {name: scores}
        items.append(replace(item, attachments=replace(item.attachments, **changes)))
    return make_batch(items, batch.meta)


class BatchScorer(Protocol):
    """Attaches scores to a batch: one of the `scorers` of a `ScoredBatchSource`."""

    async def score(self, batch: SAWBatch) -> SAWBatch: ...


class ScoredBatchSource(WrappedSource):
    """Applies scorers to every batch of a source; it can be resumed if that source can."""

    def __init__(self, source: GivesBatches, scorers: Sequence[BatchScorer]) -> None:
        super().__init__(source)
        self.scorers = scorers

    def changes(self, model: nn.Module) -> bool:
        return super().changes(model) or any(_scores_with(model, s) for s in self.scorers)

    def refers_to(self, model: nn.Module) -> bool:
        references = [s.reference for s in self.scorers if isinstance(s, ReferenceScorer)]
        return super().refers_to(model) or any(
            type(scores) is LocalScores
            and not scores.without_adapter
            and _scores_with(model, scores)
            for scores in references
        )

    async def next_batch(self) -> SAWBatch:
        """The next batch of the wrapped source, with its scores."""
        batch = await self.source.next_batch()
        for scorer in self.scorers:
            batch = await scorer.score(batch)
        return batch


def _scores_with(model: nn.Module, part: object) -> bool:
    """Whether a scorer, or what it scores with, has all that is trained of `model`: PEFT puts an
    adapter into the very layers of the base that it was given."""
    match part:
        case LocalScores():
            trained = {id(p) for p in model.parameters() if p.requires_grad}
            return bool(trained) and trained.issubset(map(id, part.policy.model.parameters()))
        case ReferenceScorer(scores) | TeacherScorer(scores):
            return _scores_with(model, scores)
        case RoutedScores(models):
            return any(_scores_with(model, scores) for scores in models.values())
    return False
