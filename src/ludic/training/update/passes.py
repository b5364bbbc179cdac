"""The arithmetic of one optimizer step: micro-batches forward and backward, and log-prob
scoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from torch import Tensor, nn

from ludic.plumbing.precision import float32_products
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch
from ludic.seeding import derive_seed
from ludic.sharding.world import World
from ludic.training.config import TrainerConfig
from ludic.training.metrics.stats import StatBuffer, Workload, policy_stats
from ludic.training.types import Loss, Stat, TokenLogProbs
from ludic.training.update.budget import default_budget
from ludic.training.update.fused_layers import adding_to
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.packing import Layout, lay_out, pack
from ludic.training.update.planning import Cost, plan_micro_batches, workload
from ludic.training.update.policy import Policy
from ludic.training.update.recovery import Part, Recovery
from ludic.training.update.scores import ScoreRecord, Scores, score_layout


@dataclass(slots=True)
class Passes:
    """Forward and backward passes over macro-batches, on this rank. One that does not fit is
    computed in parts (`recovery`), unless `recovers` is False."""

    policy: Policy
    loss: Loss
    cfg: TrainerConfig
    world: World
    cost: Cost
    recovers: bool = True
    recovery: Recovery = field(init=False)

    def __post_init__(self) -> None:
        said = self.cfg.micro_token_budget
        fitting = said or default_budget(self.policy.model, self.cfg, self.world)
        self.recovery = Recovery(self.policy, self.world, fitting, on=self.recovers)

    @property
    def budget(self) -> int:
        """The tokens of one forward pass: as `cfg` says, or as many as fit."""
        return self.recovery.budget

    def plan(self, layout: Layout) -> tuple[list[Part], Workload]:
        """This rank's micro-batches, and the work of all ranks that counts. A rank without work
        repeats a small one for nothing, since all must take part in the collectives."""
        # A budget that was found too large for several rows does not bar a longer one alone.
        longest = max(layout.order.lengths)
        plan = plan_micro_batches(
            layout,
            micro_token_budget=max(self.budget, min(longest, self.recovery.first_budget)),
            scope=self.loss.scope,
            cost=self.cost,
            world_size=self.world.size,
            longest_packed=self.policy.longest_packed,
            shares=self.policy.shares,
        )
        works = {
            m: workload(layout, m, self.cost, shares=self.policy.shares_in(layout, m))
            for rank in plan
            for m in rank
            if m
        }
        spare = min(works, key=lambda m: works[m].tokens)
        own = [(m, True) if m else (spare, False) for m in plan[self.world.rank]]
        return own, sum(works.values(), Workload())

    def accumulate(
        self,
        layout: Layout,
        optimizer: MasterAdamW,
        stats: StatBuffer,
        *,
        version: int,
        proximal: Scores | None,
        keep: tuple[ScoreRecord, Sequence[int]] | None = None,
    ) -> Workload:
        """Adds the batch's gradient to the optimizer, one micro-batch after another. `keep` has
        what takes the scores, and the numbers that it knows the layout's items by. Returns what
        all ranks computed for it."""
        plan, work = self.plan(layout)
        already: _Already = []

        def forward(part: Part) -> _Made:
            _require_gradients(already, True)
            _require_gradients([own for own in already if own[0].issuperset(part[0])], False)
            with adding_to(optimizer.product_sums()):
                return self._forward(layout, part, proximal, version)

        def backward(made: _Made) -> TokenLogProbs:
            before = optimizer.gradients_held()
            try:
                if made.loss.requires_grad:
                    with float32_products(self.policy.precision):
                        made.loss.backward()  # type: ignore[no-untyped-call]
            except Exception:
                already.append((set(made.part[0]), optimizer.take_back(before)))
                raise
            optimizer.accumulate()
            stats.add(made.stats, counted=made.part[1])
            return made.scored

        try:
            for whole in plan:
                passes = self.recovery.run(layout, whole, self.loss.scope, forward, backward)
                for (items, counted), scored in passes:
                    if keep is not None and counted:
                        keep[0].add([keep[1][i] for i in items], scored)
        finally:
            _require_gradients(already, True)
        return work

    def _forward(self, layout: Layout, part: Part, proximal: Scores | None, version: int) -> _Made:
        items, counted = part
        share = self.policy.shares_in(layout, items)
        micro = pack(layout, items, proximal_logprobs=proximal, share=share).to(self.world.device)
        with float32_products(self.policy.precision):
            scored = self.policy.score(micro, entropy=True, logits=self.loss.needs_logits)
            loss, loss_stats = self.loss.compute(scored, micro.loss)
        own = {"loss": Stat.sum(loss), **policy_stats(scored, micro.loss, version), **loss_stats}
        # Without what leads back to the parameters, which would stay alive during the next pass.
        entropy = None if scored.entropy is None else scored.entropy.detach()
        # FSDP averages gradients over ranks, while these losses are shares of a sum.
        return _Made(
            loss * (self.world.size if counted else 0),
            TokenLogProbs(scored.logprobs.detach(), entropy),
            own,
            part,
        )

    def score(self, batch: SAWBatch) -> Scores:
        """The present policy's log-probs of every item, on every rank: at the start of an update,
        the proximal policy's."""
        layout = lay_out(batch, max_seq_len=self.cfg.max_seq_len)
        return score_layout(self.recovery, layout, self.plan(layout)[0])


_Already: TypeAlias = list[tuple[set[int], list[nn.Parameter]]]
"""Items, and the parameters that have got their gradient, in a pass that failed elsewhere."""


def _require_gradients(already: _Already, required: bool) -> None:
    for _, parameters in already:
        for parameter in parameters:
            parameter.requires_grad_(required)


class _Made(NamedTuple):
    """What a forward pass leaves for the backward pass."""

    loss: Tensor
    scored: TokenLogProbs
    stats: dict[str, Stat]
    part: Part


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The part of a batch that one optimizer step is taken on, with its own counts."""

    layout: Layout
    members: tuple[int, ...]


def mini_batches(batch: SAWBatch, cfg: TrainerConfig, *, step: int) -> list[MiniBatch]:
    """The batch, split for every optimizer step that it gives; rollouts stay whole.

    The order is drawn from the run's seed, the step and the epoch.
    """
    if cfg.updates_per_batch == 1:
        layout = lay_out(batch, max_seq_len=cfg.max_seq_len)
        return [MiniBatch(layout, tuple(range(len(batch.items))))]
    rollouts: dict[str, list[int]] = {}
    for index, item in enumerate(batch.items):
        rollouts.setdefault(item.rollout_id or f"sample-{index}", []).append(index)
    result = []
    for epoch in range(cfg.epochs):
        rng = np.random.default_rng(derive_seed(cfg.seed, "mini_batches", step, epoch))
        names = list(rollouts)
        order = rng.permutation(len(names))
        for part in np.array_split(order, min(cfg.mini_batches, len(names))):
            members = tuple(sorted(i for n in part for i in rollouts[names[int(n)]]))
            share = make_batch([batch.items[i] for i in members], batch.meta)
            result.append(MiniBatch(lay_out(share, max_seq_len=cfg.max_seq_len), members))
    return result
