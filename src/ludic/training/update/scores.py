"""The scores of a batch: log-probs under the current policy, and those that go to a token log."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ludic.plumbing.precision import float32_products
from ludic.rollouts.token_log import TokenLog, UpdateTokens
from ludic.saw.items import SAWBatch
from ludic.sharding.world import World
from ludic.training.losses.policy_ratio import MAX_LOG_RATIO
from ludic.training.types import TokenLogProbs
from ludic.training.update.packing import Layout, pack
from ludic.training.update.recovery import Part, Recovery


class ScoreRecord:
    """Collects the scores of a batch, micro-batch by micro-batch, where they were computed.

    Nothing is copied to the host before `write`, so that no pass has to wait.
    """

    def __init__(self, batch: SAWBatch) -> None:
        self.batch = batch
        self._found: list[tuple[Sequence[int], Tensor]] = []

    def add(self, items: Sequence[int], scored: TokenLogProbs) -> None:
        """Takes the scores of some of the batch's items, in this order."""
        logprobs, entropy = scored.logprobs, scored.entropy
        if entropy is None:
            entropy = torch.full_like(logprobs, torch.nan)
        self._found.append((items, torch.stack([logprobs, entropy]).detach().float()))

    def write(self, log: TokenLog | None, update: int, world: World) -> None:
        """Gathers the ranks' scores, and hands them to `log` where there is one."""
        items = self.batch.items
        places = np.concatenate([[0], np.cumsum([item.turns[-1].end for item in items])])
        values = torch.zeros(2, int(places[-1]), device=world.device)
        for members, scores in self._found:
            where = np.concatenate([np.arange(places[i], places[i + 1]) for i in members])
            values[:, torch.from_numpy(where).to(values.device)] = scores
        if world.group is not None:
            dist.all_reduce(values, group=world.group)
        if log is not None:
            logprobs, entropies = values.cpu().numpy()
            log.write(UpdateTokens(update, items, logprobs, entropies))


Scores = list[NDArray[np.float32]]
"""Log-probs of a batch's action tokens, one array per item."""


@torch.no_grad()
def score_layout(recovery: Recovery, layout: Layout, plan: Sequence[Part]) -> Scores:
    """The policy's log-probs of every item, each rank having computed its own micro-batches."""
    policy, world = recovery.policy, recovery.world
    places = np.concatenate([[0], np.cumsum([p.actions.size for p in layout.packed])])
    values = torch.zeros(int(places[-1]), device=world.device)

    def forward(part: Part) -> Tensor:
        share = policy.shares_in(layout, part[0])
        micro = pack(layout, part[0], share=share).to(world.device)
        with float32_products(policy.precision):
            return policy.score(micro).logprobs.float()

    for part in plan:
        for (items, counted), scored in recovery.run(layout, part, "token", forward):
            if counted:
                where = np.concatenate([np.arange(places[i], places[i + 1]) for i in items])
                values[torch.from_numpy(where).to(values.device)] = scored
    if world.group is not None:
        dist.all_reduce(values, group=world.group)
    flat = values.cpu().numpy()
    return [flat[a:b] for a, b in pairwise(places)]


def mean_kl(before: Scores, after: Scores) -> float:
    """KL(before || after) per token, estimated (k3) on tokens that the first policy sampled."""
    gap = np.concatenate(after).astype(np.float64) - np.concatenate(before)
    gap = gap.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return max(float(np.mean(np.expm1(gap) - gap)), 0.0)
