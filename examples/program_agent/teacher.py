"""The cold start's teacher: it looks up some item, often the wrong one, and tells its price."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

ITEMS = ("apple", "pear", "plum", "fig")


def guess(said: str, rng: Random, history: Sequence[Any]) -> str:
    """After a question, a look at the right price or at any; after the look, what it showed."""
    if history:
        return said
    wanted = next(item for item in ITEMS if item in said)
    call = {"name": "price", "arguments": {"item": rng.choice((wanted, *ITEMS))}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"
