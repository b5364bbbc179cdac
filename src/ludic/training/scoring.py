"""Log-probs of a second model, attached to a batch: a reference to stay near, or a teacher.

A scorer gives each item the log-probs that its model has for the item's action tokens, at the
temperature and over the kept ids that they were sampled with, as the trainer does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ludic.errors import BatchError, DeadlineError, NotTrainableError, UnknownNameError
from ludic.inference.client import ChatClient, TokenCompletionRequest
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch, SAWItem
from ludic.training.types import BatchSource, Stateful

if TYPE_CHECKING:
    from torch import nn

Scores = list[NDArray[np.float32]]


class Scorer(Protocol):
    """Scores the action tokens of items."""

    async def score(self, items: Sequence[SAWItem]) -> Scores:
        """One array per item, with one log-prob per action token."""
        ...


class LocalScorer:
    """Scores with a model in this process, through the trainer's own arithmetic.

    `model` is a frozen causal LM. With `without_adapter` it is a PEFT model whose base is the
    reference: its adapter is off while it scores, so nobody may sample from it meanwhile.
    """

    def __init__(
        self, model: nn.Module, *, micro_token_budget: int = 16384, without_adapter: bool = False
    ) -> None:
        from ludic.training.policy import Policy

        self.policy = Policy(model)
        self.micro_token_budget = micro_token_budget
        self._adapter_off: Callable[[], Any] = (
            model.disable_adapter if without_adapter else nullcontext  # type: ignore[assignment]
        )

    async def score(self, items: Sequence[SAWItem]) -> Scores:
        return await asyncio.to_thread(self._score, items)

    def _score(self, items: Sequence[SAWItem]) -> Scores:
        import torch

        from ludic.training.packing import lay_out, pack, plan_micro_batches

        layout = lay_out(make_batch(items))
        longest = max(p.input_ids.size for p in layout.packed)
        budget = max(self.micro_token_budget, longest)
        (plan,) = plan_micro_batches(layout, micro_token_budget=budget)
        device = next(self.policy.parameters()).device
        scores: Scores = [np.empty(p.actions.size, dtype=np.float32) for p in layout.packed]
        with torch.no_grad(), self._adapter_off():
            for members in filter(None, plan):
                found = self.policy.score(pack(layout, members).to(device)).logprobs
                flat, start = found.float().cpu().numpy(), 0
                for member in members:
                    scores[member][:] = flat[start : start + len(scores[member])]
                    start += len(scores[member])
        return scores


@dataclass(frozen=True, slots=True)
class ClientScorer:
    """Scores with any `ChatClient` that returns `prompt_logprobs`: a teacher behind a server.

    Most servers report prompt log-probs at temperature 1 whatever is asked; `tempered` says that
    this one applies the request's temperature. Otherwise items sampled at another are refused, as
    are those of truncated sampling, whose kept ids no server takes.
    """

    client: ChatClient
    model: str
    concurrency: int = 8
    timeout_s: float = 120.0
    tempered: bool = False

    async def score(self, items: Sequence[SAWItem]) -> Scores:
        slots = asyncio.Semaphore(self.concurrency)

        async def one(item: SAWItem) -> NDArray[np.float32]:
            async with slots:
                return await self._score(item)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(item)) for item in items]
        except ExceptionGroup as failed:  # the first cause says it better than the bundle
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _score(self, item: SAWItem) -> NDArray[np.float32]:
        where = f"rollout {item.rollout_id!r}"
        kept = item.attachments.kept_token_ids
        if kept is not None and any(len(ids) for ids in kept):
            raise NotTrainableError(
                f"{where} was sampled with truncation, which a server cannot score alike: use a "
                "LocalScorer, or sample without top-p, top-k and min-p"
            )
        if item.temperature != 1.0 and not self.tempered:
            raise NotTrainableError(
                f"{where} was sampled at temperature {item.temperature}, and {self.model!r} is "
                "scored at 1: sample at 1, use a LocalScorer, or set tempered=True for a server "
                "that applies the temperature to prompt log-probs"
            )
        shown = np.asarray(item.attention_mask, dtype=bool)
        actions = np.flatnonzero(np.asarray(item.action_mask, dtype=bool)[shown])
        request = TokenCompletionRequest(
            self.model,
            tuple(np.asarray(item.input_ids)[shown].tolist()),
            SamplingConfig(temperature=item.temperature, max_tokens=1),
            ReturnSpec(logprobs=False, prompt_logprobs=True),
            timeout_s=self.timeout_s,
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self.client.complete_tokens(request)
        except TimeoutError as exc:
            raise DeadlineError(f"the scores of {where}", repr(self.model), self.timeout_s) from exc
        found = response.info.get("prompt_logprobs")
        if found is None or len(found) != int(shown.sum()):
            got = "none" if found is None else len(found)
            raise BatchError(
                f"{where}: {got} prompt log-probs for {int(shown.sum())} tokens; the client must "
                'answer ReturnSpec(prompt_logprobs=True) in info["prompt_logprobs"]'
            )
        values = [found[position] for position in actions]
        if any(value is None for value in values):
            raise BatchError(f"{where}: an action token came back without a log-prob")
        return np.array(values, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class RoutedScorer:
    """Several teachers: each item is scored by the one that `route` names, by default the
    rollout's `meta["teacher"]`."""

    scorers: Mapping[str, Scorer]
    route: Callable[[SAWItem], str] = lambda item: str(item.meta.get("teacher"))

    async def score(self, items: Sequence[SAWItem]) -> Scores:
        places: dict[str, list[int]] = {}
        for position, item in enumerate(items):
            name = self.route(item)
            if name not in self.scorers:
                raise UnknownNameError(
                    f"teacher of rollout {item.rollout_id!r},", name, self.scorers
                )
            places.setdefault(name, []).append(position)
        scores: Scores = [np.empty(0, dtype=np.float32)] * len(items)
        for name, members in places.items():
            found = await self.scorers[name].score([items[m] for m in members])
            for member, values in zip(members, found, strict=True):
                scores[member] = values
        return scores


@dataclass(frozen=True, slots=True)
class ScoredBatchSource:
    """A batch source whose items also carry the reference's and the teacher's log-probs.

    It is as resumable as the source inside.
    """

    source: BatchSource
    reference: Scorer | None = None
    teacher: Scorer | None = None

    async def next_batch(self) -> SAWBatch:
        """The next batch of the source inside, scored."""
        batch = await self.source.next_batch()
        if self.reference is not None:
            batch = await attach_scores(batch, self.reference, "reference")
        if self.teacher is not None:
            batch = await attach_scores(batch, self.teacher, "teacher")
        return batch

    def state_dict(self) -> Mapping[str, Any]:
        """The state of the source inside."""
        return {"source": self.source.state_dict() if isinstance(self.source, Stateful) else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hands the state to the source inside."""
        if isinstance(self.source, Stateful) and state["source"] is not None:
            self.source.load_state_dict(state["source"])


async def attach_scores(
    batch: SAWBatch, scorer: Scorer, role: Literal["reference", "teacher"]
) -> SAWBatch:
    """The batch with the scorer's log-probs attached to every item, as those of `role`."""
    if not batch.items:
        return batch
    items = []
    for item, scores in zip(batch.items, await scorer.score(batch.items), strict=True):
        if not np.isfinite(scores).all():
            raise BatchError(f"rollout {item.rollout_id!r}: the {role}'s log-probs are not finite")
        attached = (
            replace(item.attachments, reference_logprobs=scores)
            if role == "reference"
            else replace(item.attachments, teacher_logprobs=scores)
        )
        items.append(replace(item, attachments=attached))
    return make_batch(items, batch.meta)
