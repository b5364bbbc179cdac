"""How long a publish may take at most. Whoever waits for a publish adds this to its own
deadline, so that the first error to appear is the one that names the server."""

from __future__ import annotations

from ludic.distributed.interfaces import PolicyPublisher

PATIENCE_S = 10.0
CLEAN_UP_STEPS = 5
"""What a publish that failed asks of a server at most, one after the other, each for `patience_s`:
drop what it staged, resume, send its requests away, say whether it is healthy, and wait for the
threads that still read."""
SLACK_S = 10.0
"""What a deadline has more than the sum of those inside it."""


def patience_of(timeout_s: float) -> float:
    """One server that hangs must leave the others time for the rest of a short publish."""
    return min(PATIENCE_S, timeout_s / 4)


def longest_publish_s(
    timeout_s: float, *, servers_s: float = 0.0, patience_s: float | None = None
) -> float:
    """How long a publish to servers takes at most: `servers_s` until one answers, its own
    `timeout_s`, and a clean-up where it failed."""
    patience_s = patience_of(timeout_s) if patience_s is None else patience_s
    return servers_s + timeout_s + CLEAN_UP_STEPS * patience_s


def limit_of(publisher: PolicyPublisher, otherwise: float) -> float:
    """The deadline for one publish, from outside: later than its own ones. `otherwise`: of one that
    has none."""
    return otherwise if publisher.longest_s is None else publisher.longest_s + SLACK_S
