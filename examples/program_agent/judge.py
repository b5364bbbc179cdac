"""The reward: a right price that the agent looked up."""

from __future__ import annotations

from ludic.interaction import ProgramAttempt


def looked_up(attempt: ProgramAttempt) -> float:
    """1 if the program's answer is the price, and one of its tool results shows it."""
    seen = [message["content"] for message in attempt.messages if message["role"] == "tool"]
    return float(attempt.answer == attempt.target and attempt.answer in seen)
