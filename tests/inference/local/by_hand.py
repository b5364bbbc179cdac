"""Schedulers advanced by hand: no thread, no clock. One is over a model that always says 1."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from ludic.inference.local.arena import KVShape, SlotMemory
from ludic.inference.local.build import build_scheduler
from ludic.inference.local.eager import EagerScheduler
from ludic.inference.local.prefix_store import PrefixStore, key_of_ids
from ludic.inference.local.scheduler import Outcome, Work
from ludic.inference.local.sequence import Sequence
from ludic.inference.sampling import ReturnSpec, SamplingConfig

SHAPE = KVShape(1, 1, 2, torch.float32, torch.device("cpu"))


class SaysOne(EagerScheduler):
    """Every sampled token is 1."""

    def compute(self, work: Seq[Work]) -> list[Outcome]:
        return [Outcome(1, -1.0) if w.samples else Outcome() for w in work]

    def decode_step(self, work: Seq[Work]) -> None:
        return None


class Spells:
    """The text of some tokens is their numbers."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(ids)


def scheduler(*, step_rows: int, max_slots: int) -> EagerScheduler:
    memory = SlotMemory(SHAPE, max_slots=max_slots, max_tokens=1024)
    forward: Any = None  # nobody calls it
    return SaysOne(forward, None, memory, PrefixStore(0), Spells(), step_rows=step_rows)


def pipelined(model: Any, *, max_slots: int, max_context_tokens: int = 64) -> Any:
    """The GPU's scheduler over a real model."""
    return build_scheduler(
        model,
        Spells(),
        max_slots=max_slots,
        max_context_tokens=max_context_tokens,
        deterministic=False,
        step_rows=None,
        prefix_cache_tokens=None,
        pipelined=True,
        version=0,
    )


def sequence(
    prompt: Seq[int],
    limit: int,
    answers: list[Any] | None = None,
    returns: ReturnSpec | None = None,
) -> Sequence:
    """A request whose answer is appended to `answers`."""
    return Sequence(
        prompt_token_ids=tuple(prompt),
        prompt_key=key_of_ids(prompt),
        limit=limit,
        sampling=SamplingConfig(),
        returns=returns or ReturnSpec(),
        key=0,
        stop_ids=frozenset(),
        deliver=(answers if answers is not None else []).append,
    )
