"""What publishers to a client's servers have in common: versions, one at a time, a deadline."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from torch import nn

from ludic.distributed.interfaces import PublishReport, Weights
from ludic.distributed.vllm.canary import MismatchBudget, canary_tokens, is_sharded
from ludic.errors import ConfigError, DeadlineError, PublishError
from ludic.inference.vllm.client import VLLMChatClient


class ServerPublisher(ABC):
    """Publishes to the servers of `client`; how is for subclasses to say, in `_publish`."""

    shares_weights = False

    def __init__(
        self,
        client: VLLMChatClient,
        *,
        canary: bool,
        canary_prompt: Sequence[int] | None,
        budget: MismatchBudget | None,
        timeout_s: float,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"{type(self).__name__}(timeout_s={timeout_s}): must be > 0")
        self.client = client
        self.canary = canary
        self.canary_prompt = None if canary_prompt is None else tuple(canary_prompt)
        self.budget = budget
        self.timeout_s = timeout_s
        self.version: int | None = None
        self._lock = asyncio.Lock()
        client.weight_sender = self.publish

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """The servers have a copy of their own: nothing needs to stop while the trainer steps."""
        yield

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        """Makes `weights` policy `version` on every server that answers.

        Raises `PublishError` when the weights are wrong or no server could take them; servers that
        did not answer are out of rotation and named in the report. The first publish may go to any
        version (a checkpoint's); after that it never goes back.
        """
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s), self._lock:
                if self.version is not None and version < self.version:
                    raise PublishError(
                        f"version {version} is older than {self.version}, which was published "
                        "before: versions never go back within a run"
                    )
                report = await self._publish(weights, version, began)
                self.version = version
                return report
        except TimeoutError as exc:
            if isinstance(exc, DeadlineError):
                raise
            raise DeadlineError(
                f"the publish of version {version}", self._states(), self.timeout_s
            ) from exc

    @abstractmethod
    async def _publish(self, weights: Weights, version: int, began: float) -> PublishReport:
        """One publish, under the lock and within the deadline."""

    def _states(self) -> str:
        """How the servers are, for an error."""
        return "; ".join(replica.describe() for replica in self.client.replicas)

    def _canary_model(self, weights: Weights) -> nn.Module | None:
        """The model that can score the canary, where there is one and it is wanted."""
        model = getattr(weights, "model", None) if self.canary else None
        return None if model is None or is_sharded(model) else model

    def _prompt(self, model: nn.Module) -> tuple[int, ...]:
        """The canary's prompt; made when it is first needed, which takes a while."""
        if self.canary_prompt is None:
            self.canary_prompt = canary_tokens(model)
        return self.canary_prompt

    def _budget(self, model: nn.Module) -> MismatchBudget:
        return self.budget or MismatchBudget.for_dtype(next(model.parameters()).dtype)
