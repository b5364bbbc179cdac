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

from ludic.distributed.interfaces import (
    PolicyPublisher,
    PublishReport,
    Snapshot,
    Weights,
    named_tensors,
)
from ludic.distributed.weights_http import PolicyServer
from ludic.errors import PipelineError, PublishError
from ludic.inference.retries import within
from ludic.pipeline.lease import TrainerLease
from ludic.pipeline.messages import Unit, with_traces
from ludic.plumbing.files import boot_id, file_checksum, replacing
from ludic.types import Rollout, TokenTrace, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """A policy as the trainer announced it. `serial` is its name among all policies of the run;
    `path` is empty where the actors' servers get the weights in another way. `file` says which file
    the trainer's kernel has there, `checksum` what is in it, where others may read it. Hosts that
    cannot open it fetch it from `url`, with `key`, or its `difference`: the checksum of that file,
    and of the policy that it was made against."""

    serial: int
    attempt: int
    version: int
    path: str = ""
    checksum: str = ""
    at: str = ""
    file: str = ""
    url: str = ""
    key: str = field(default="", repr=False)
    difference: Sequence[str] = ()

    @staticmethod
    def read(announced: bytes) -> StoredPolicy:
        """Raises `PipelineError` for what is no policy."""
        serial, facts = json.loads(announced)
        try:
            return StoredPolicy(serial, **facts)
        except TypeError as exc:
            raise PipelineError(f"not an announced policy: {exc}") from exc

    def is_enough_for(self, unit: Unit) -> bool:
        """Whether the unit may begin with it."""
        newer = (self.attempt, self.version) >= (unit.attempt, unit.version)
        return newer and self.serial >= unit.policy


class PolicyFolder:
    """Where the trainer puts its weights for the actors: a folder that they share, or shared
    memory. A file appears whole or not at all, and is not written to again; the newest `keep` stay.

    A reader under the same kernel sees by the file's number, size and time that it is the one that
    was written. For others the content is `hashed`: unless said otherwise, if the folder is not in
    this host's memory.
    """

    def __init__(self, path: str | Path, *, keep: int = 2, hashed: bool | None = None) -> None:
        self.path, self.keep = Path(path), keep
        in_memory = self.path.resolve().is_relative_to("/dev/shm")
        self.hashed = not in_memory if hashed is None else hashed

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
                checksum = file_checksum(temporary) if self.hashed else ""
        except OSError as exc:
            raise PublishError(f"cannot write policy {version} to {self.path}: {exc}") from exc
        for old in sorted(self.path.glob("policy-*.safetensors"))[: -self.keep]:
            old.unlink(missing_ok=True)
        where = {"path": str(target.resolve()), "checksum": checksum}
        return where | {"file": file_in_kernel(target)}


def load_policy(policy: StoredPolicy) -> dict[str, Tensor] | None:
    """Returns the weights of an announced policy; None if a newer one took its file's place.

    They are mapped and not copied; those of a file that is replaced later stay as they are. Raises
    `PublishError` when the file is not what was announced.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        path = Path(policy.path)
        same = policy.file == file_in_kernel(path)
        if not same and not (policy.checksum and file_checksum(path) == policy.checksum):
            raise PublishError(f"{policy.path} is not the policy {policy.version} it should be")
        return load_file(policy.path)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as exc:
        raise PublishError(f"cannot read policy {policy.version}: {exc}") from exc


def file_in_kernel(path: Path) -> str:
    """Names the file as this host's kernel has it: the boot, the file system, its number there, its
    size and when it was last written. Another name: another file, or another kernel."""
    facts = path.stat()
    return f"{boot_id()}/{facts.st_dev}/{facts.st_ino}/{facts.st_size}/{facts.st_mtime_ns}"


class PipelinePublisher(PolicyPublisher):
    """Makes new weights known to the actors of a run.

    `inner` brings the weights to whatever else samples from them: vLLM servers, or an engine in
    this process. With a `folder` they are also written there, for actors that sample in-process.
    Redis only carries the policy's address, version and checksum, once it is there to be used. A
    `server` also brings the folder's files to hosts that do not share it. `timeout_s` is for what
    is done here; `inner` has a deadline of its own.
    """

    def __init__(
        self,
        lease: TrainerLease,
        inner: PolicyPublisher | None = None,
        folder: PolicyFolder | None = None,
        server: PolicyServer | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.lease, self.inner, self.folder, self.server = lease, inner, folder, server
        self.timeout_s = timeout_s
        self.shares_weights = inner is not None and inner.shares_weights
        self.snapshots = "host" if inner is None else inner.snapshots

    @property
    def longest_s(self) -> float | None:  # type: ignore[override]
        """See `PolicyPublisher`."""
        if self.inner is None:
            return self.timeout_s
        return None if self.inner.longest_s is None else self.inner.longest_s + self.timeout_s

    def snapshot_of(self, weights: Weights) -> Weights:
        """What `inner` needs; the folder needs all."""
        if self.inner is None or self.folder is not None:
            return weights
        return self.inner.snapshot_of(weights)

    def updating(self) -> AbstractAsyncContextManager[None]:
        return super().updating() if self.inner is None else self.inner.updating()

    async def prepare(self, weights: Weights, version: int) -> None:
        """Has the actors' units wait for `version` from now on, where they must not be older."""
        await asyncio.to_thread(self.lease.expect, version)  # it may have to wait for Redis
        if self.inner is not None:
            await self.inner.prepare(weights, version)

    async def read_model(self, weights: Weights, version: int) -> None:
        """See `PolicyPublisher`."""
        if self.inner is not None:
            await self.inner.read_model(weights, version)

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        began = time.perf_counter()
        async with within(self.timeout_s, "the run's lease", self._where):
            attempt = (await self.lease.acquire_async()).attempt
        left_s = self.timeout_s - (time.perf_counter() - began)
        report = PublishReport(version, 0.0, verified=True)
        if self.inner is not None:
            report = await self.inner.publish(weights, version)
        async with within(left_s, f"policy {version} to be announced", self._where):
            await self._announce(weights, version, attempt)
        seconds = time.perf_counter() - began
        return PublishReport(version, seconds, report.bytes, report.verified, report.details)

    async def _announce(self, weights: Weights, version: int, attempt: int) -> None:
        facts: dict[str, Any] = {}
        if self.folder is not None:
            tensors = named_tensors(weights)
            if not isinstance(weights, Snapshot):
                tensors = iter([(name, tensor.detach().clone()) for name, tensor in tensors])
            facts = await asyncio.to_thread(
                self.folder.write, tensors, attempt=attempt, version=version
            )
            if self.server is not None:
                path = Path(facts["path"])
                facts |= await asyncio.to_thread(self.server.offer, path, facts["checksum"])
        await asyncio.to_thread(self.lease.announce, version, **facts)

    def _where(self) -> str:
        redis = self.lease.config.shown
        return redis if self.folder is None else f"{self.folder.path} and {redis}"


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
