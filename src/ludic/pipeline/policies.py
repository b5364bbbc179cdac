"""The policies of a run: how actors hear of them, and which of them sampled each token.

Actors that sample in-process load them from safetensors files, by address, version and checksum.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ludic.distributed.interfaces import PolicyPublisher, PublishReport, Weights, named_tensors
from ludic.errors import PipelineError, PublishError
from ludic.pipeline.lease import TrainerLease
from ludic.pipeline.messages import with_traces
from ludic.pipeline.weights_http import PolicyServer
from ludic.plumbing.files import file_checksum, replacing
from ludic.types import Rollout, TokenTrace, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """A policy as the trainer announced it. `serial` is its name among all policies of the run;
    `path` is empty where the actors' servers get the weights in another way. Hosts that cannot open
    it fetch the file from `url`, with `key`."""

    serial: int
    attempt: int
    version: int
    path: str = ""
    checksum: str = ""
    at: str = ""
    url: str = ""
    key: str = field(default="", repr=False)

    @staticmethod
    def read(announced: bytes) -> StoredPolicy:
        """Raises `PipelineError` for what is no policy."""
        serial, facts = json.loads(announced)
        try:
            return StoredPolicy(serial, **facts)
        except TypeError as exc:
            raise PipelineError(f"not an announced policy: {exc}") from exc


class PolicyFolder:
    """Where the trainer puts its weights for the actors: a folder that they share, or shared
    memory. A file appears whole or not at all; the newest `keep` stay."""

    def __init__(self, path: str | Path, *, keep: int = 2) -> None:
        self.path, self.keep = Path(path), keep

    def write(
        self, weights: Iterable[tuple[str, Tensor]], *, attempt: int, version: int
    ) -> dict[str, Any]:
        """Writes a policy; returns what to announce of it."""
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
        self.path.mkdir(parents=True, exist_ok=True)
        target = self.path / f"policy-{attempt:06d}-{version:08d}.safetensors"
        try:
            with replacing(target) as temporary:
                save_file(tensors, temporary)
                checksum = file_checksum(temporary)
        except OSError as exc:
            raise PublishError(f"cannot write policy {version} to {self.path}: {exc}") from exc
        for old in sorted(self.path.glob("policy-*.safetensors"))[: -self.keep]:
            old.unlink(missing_ok=True)
        return {"path": str(target.resolve()), "checksum": checksum}


def load_policy(policy: StoredPolicy) -> dict[str, Tensor] | None:
    """Returns the weights of an announced policy; None if a newer one took its file's place.

    Raises `PublishError` when the file is not what was announced.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file_checksum(Path(policy.path)) != policy.checksum:
            raise PublishError(f"{policy.path} is not the policy {policy.version} it should be")
        return load_file(policy.path)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as exc:
        raise PublishError(f"cannot read policy {policy.version}: {exc}") from exc


class PipelinePublisher(PolicyPublisher):
    """Makes new weights known to the actors of a run.

    `inner` brings the weights to whatever else samples from them: vLLM servers, or an engine in
    this process. With a `folder` they are also written there, for actors that sample in-process.
    Redis only carries the policy's address, version and checksum, once it is there to be used. A
    `server` also brings the folder's files to hosts that do not share it.
    """

    def __init__(
        self,
        lease: TrainerLease,
        inner: PolicyPublisher | None = None,
        folder: PolicyFolder | None = None,
        server: PolicyServer | None = None,
    ) -> None:
        self.lease, self.inner, self.folder, self.server = lease, inner, folder, server
        self.shares_weights = inner is not None and inner.shares_weights

    def updating(self) -> AbstractAsyncContextManager[None]:
        return super().updating() if self.inner is None else self.inner.updating()

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        began = time.perf_counter()
        opened = await self.lease.acquire_async()
        report = PublishReport(version, 0.0, verified=True)
        if self.inner is not None:
            report = await self.inner.publish(weights, version)
        facts: dict[str, Any] = {}
        if self.folder is not None:
            tensors = [(name, tensor.detach().clone()) for name, tensor in named_tensors(weights)]
            facts = await asyncio.to_thread(
                self.folder.write, tensors, attempt=opened.attempt, version=version
            )
            if self.server is not None:
                path = Path(facts["path"])
                facts |= await asyncio.to_thread(self.server.offer, path, facts["checksum"])
        await asyncio.to_thread(self.lease.announce, version, **facts)
        seconds = time.perf_counter() - began
        return PublishReport(version, seconds, report.bytes, report.verified, report.details)


class AmbiguousVersionError(PipelineError):
    """A span whose version number two attempts have used while it was sampled."""


def stamped(
    rollouts: Sequence[Rollout], seen: Sequence[StoredPolicy], *, by_serial: bool
) -> list[Rollout]:
    """The same rollouts, with attempt and version in every span of tokens.

    `seen` are the policies that there were while they were sampled. With `by_serial`, the sampler
    counted them by serial number; otherwise spans have the trainer's versions.
    """
    policies = {policy.serial: policy for policy in seen}
    attempts: dict[int, set[int]] = {}
    for policy in seen:
        attempts.setdefault(policy.version, set()).add(policy.attempt)

    def named(span: VersionSpan) -> VersionSpan:
        if by_serial:
            policy = policies.get(span.version, span)
            return replace(span, version=policy.version, attempt=policy.attempt)
        possible = attempts.get(span.version, set())
        if len(possible) > 1:
            raise AmbiguousVersionError(
                f"version {span.version} is that of the attempts {sorted(possible)}, and both were "
                "there while it was sampled"
            )
        attempt = next(iter(possible), seen[-1].attempt if seen else 0)
        return replace(span, attempt=attempt)

    def traced(trace: TokenTrace | None) -> TokenTrace | None:
        if trace is None or not trace.version_spans:
            return trace
        return replace(trace, version_spans=tuple(map(named, trace.version_spans)))

    return [with_traces(rollout, traced) for rollout in rollouts]
