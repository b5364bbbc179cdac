"""The cold start's teacher: it looks up an item, often the wrong one, and reports its price."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

ITEMS = ("apple", "pear", "plum", "fig")


def guess(said: str, rng: Random, history: Sequence[Any]) -> str:
    """After a question, looks up the right price or any; after that, reports what it found."""
    if history:
        return said
    wanted = next(item for item in ITEMS if item in said)
    call = {"name": "price", "arguments": {"item": rng.choice((wanted, *ITEMS))}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"
