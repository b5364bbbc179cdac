"""How long the parts of a run wait for new weights: each deadline is the sum of those inside it."""

from __future__ import annotations

from ludic.distributed.deadlines import SLACK_S, longest_publish_s
from ludic.launch.supervisor import LONGEST_PAUSE_S
from ludic.runs.settings.run import RunConfig


def server_return_s(config: RunConfig) -> float:
    """How long a server takes at most that is started again: the pause before it, and its start."""
    return LONGEST_PAUSE_S + config.inference.vllm.start_timeout_s


def publish_limit_s(config: RunConfig) -> float:
    """How long a publish takes at most: to servers that may have to come back first, and to be
    announced to actors."""
    timeout_s, to_servers_s = config.training.publish_timeout_s, 0.0
    if config.inference.backend == "vllm":
        registered = config.inference.servers == "registered"
        servers_s = server_return_s(config) if registered else 0.0
        to_servers_s = longest_publish_s(timeout_s, servers_s=servers_s)
    return to_servers_s + timeout_s + SLACK_S


def newest_published_s(config: RunConfig) -> float:
    """How long it takes at most until the samplers have the newest weights: another publish may be
    under way."""
    return 2 * publish_limit_s(config)
