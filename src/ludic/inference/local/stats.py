"""What the engine counts about itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the engine began.

    Written by the engine's thread only. Other threads read them without a lock: each is one number
    that is replaced whole, but two of them may be from different steps.
    """

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    slot_steps: int = 0
    admitted: int = 0
    queue_seconds: float = 0.0
    busy_seconds: float = 0.0
    prefill_seconds: float = 0.0
    wait_seconds: float = 0.0
    updates: int = 0

    def as_stats(self, max_slots: int) -> dict[str, float]:
        """The totals and the rates that follow from them."""
        totals = asdict(self)
        for only_in_a_rate in ("slot_steps", "admitted", "queue_seconds"):
            del totals[only_in_a_rate]
        return {
            **totals,
            "tokens_per_s": self.generated_tokens / self.busy_seconds if self.busy_seconds else 0.0,
            "occupancy": self.slot_steps / (self.steps * max_slots) if self.steps else 0.0,
            "cache_hit_rate": self.reused_tokens / self.prompt_tokens
            if self.prompt_tokens
            else 0.0,
            "queue_seconds_mean": self.queue_seconds / self.admitted if self.admitted else 0.0,
        }
