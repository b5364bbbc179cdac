"""Token spans that name their policy for good: by attempt and version."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ludic.errors import PipelineError
from ludic.pipeline.policies import StoredPolicy
from ludic.types import AgentStep, Rollout, TokenTrace, VersionSpan


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
            policy = policies.get(span.version)
            if policy is None:
                return span
            return replace(span, version=policy.version, attempt=policy.attempt)
        known = attempts.get(span.version, set())
        if len(known) > 1:
            raise AmbiguousVersionError(
                f"version {span.version} is that of the attempts {sorted(known)}, and both were "
                "there while it was sampled"
            )
        attempt = next(iter(known), seen[-1].attempt if seen else 0)
        return replace(span, attempt=attempt)

    def traced(trace: TokenTrace | None) -> TokenTrace | None:
        if trace is None or not trace.version_spans:
            return trace
        return replace(trace, version_spans=tuple(map(named, trace.version_spans)))

    return [
        rollout.labelled(
            steps=tuple(
                replace(step, trace=traced(step.trace)) if isinstance(step, AgentStep) else step
                for step in rollout.steps
            )
        )
        for rollout in rollouts
    ]
