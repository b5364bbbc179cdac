"""Sampling on several ranks without a server: from a copy of a small model, or not at all."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from ludic.errors import ConfigError
from ludic.inference.client import ChatClient
from ludic.runs.settings import RunConfig
from ludic.sharding.ranks import Launched, launched

MOST_PARAMETERS = 600_000_000
"""Of a model that rank 0 holds a whole copy of, beside its shard."""
HOW = (
    "from a copy that is gathered on rank 0 after every update (for trying it out: CPU ranks only)"
)


def samples(config: RunConfig, here: Launched | None = None) -> bool:
    """Whether the run asks the policy for tokens. On several ranks, a cold start alone does not: it
    needs no sampler, and its evaluations are left out where there is no server."""
    several = (here or launched()).size > 1
    return not several or bool(config.training.steps) or config.inference.backend != "local"


def gathered_copy(model: nn.Module) -> nn.Module:
    """Returns a copy for the in-process engine, with adapters merged, as they are published. It is
    made before the model is sharded. Raises `ConfigError` for a model that is not small."""
    size = sum(p.numel() for p in model.parameters())
    if size > MOST_PARAMETERS:
        raise ConfigError(
            f"on several CPU ranks rank 0 samples from a whole copy of the model, which is for "
            f"models of up to {MOST_PARAMETERS:,} parameters, and this one has {size:,}: set "
            'inference.backend = "vllm", or train on one rank'
        )
    copied = copy.deepcopy(model)
    merge: Any = getattr(copied, "merge_and_unload", None)
    whole: nn.Module = merge() if merge else copied
    return whole.requires_grad_(False)


class NoSampler(ChatClient):
    """Stands where a run has no sampler; asking it is an error."""

    @property
    def max_context_tokens(self) -> int | None:
        return None

    async def complete_tokens(self, request: object) -> NoReturn:
        raise ConfigError(
            "this run only imitates, and on several ranks it has no sampler: evaluate its "
            "checkpoint with `ludic eval`"
        )

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> NoReturn:
        raise ConfigError("there is no sampler that could take weights")
