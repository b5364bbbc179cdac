"""Two real ranks publish by shards: what is published is what would be gathered, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_two_ranks_publish_what_would_be_gathered_and_none_of_it_where_one_fails() -> None:
    """The ranks compare; here is what they print. Only an adapter's weights are gathered, one by
    one, and those of ranks on several hosts."""
    script = Path(__file__).with_name("publishing_ranks.py")
    printed = run_ranks(script, "plain", "lora", "apart", "fails", "fails-lora")
    for rank in (0, 1):
        assert f"PLAIN rank {rank} gathered 0 elements" in printed
        assert f"LORA rank {rank} gathered" in printed
        assert f"APART rank {rank} gathered" in printed
    assert printed.count("RAISED OSError: injected") == 2
    assert printed.count("RAISED PeerError: another rank failed; its own message says why") == 2
