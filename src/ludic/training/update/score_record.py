"""The log-probs and entropies that an update computes anyway, kept for the record."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ludic.rollouts.token_log import TokenLog, UpdateTokens
from ludic.saw.items import SAWBatch
from ludic.sharding.world import World
from ludic.training.types import TokenLogProbs


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
