"""How long a host waits for weights that it fetches, and which hosts it stops asking."""

from __future__ import annotations

import time
from dataclasses import dataclass
from urllib.parse import urlsplit

_AWAY_S, _AWAY_HOSTS = 600.0, 2


@dataclass(frozen=True, slots=True)
class Patience:
    """A fetch fails when nothing has come for `deadline_s`, or not all within `whole_s`; if
    `once`, also when nobody listens at the trainer's address. A source is left when it cannot be
    reached within three seconds, or sends nothing for `silence_s`; a host that passes on, also when
    a piece takes longer than `piece_s`."""

    deadline_s: float = 120.0
    silence_s: float = 10.0
    piece_s: float = 30.0
    whole_s: float = float("inf")
    once: bool = False

    @staticmethod
    def within(timeout_s: float) -> Patience:
        """For one try, of which somebody waits for the end: a trainer that has died, or has given
        it up, is not waited for, and where a host fails there is time for the trainer."""
        part = timeout_s / 4
        return Patience(min(10.0, part), min(5.0, part / 2), min(30.0, part), timeout_s, once=True)


class Away:
    """Machines that could not be reached, fell silent or were slow, by name: for ten minutes nobody
    asks them again. Where two were so and no other ever sent anything, nobody asks any: this
    machine reaches only the trainer. Threads note and read single entries."""

    def __init__(self) -> None:
        self.reached = False
        self._since: dict[str | None, float] = {}

    def note(self, url: str) -> None:
        self._since[urlsplit(url).hostname] = time.monotonic()

    def __contains__(self, url: str) -> bool:
        limit = time.monotonic() - _AWAY_S
        recent = {name for name, since in list(self._since.items()) if since > limit}
        alone = len(recent) >= _AWAY_HOSTS and not self.reached
        return alone or urlsplit(url).hostname in recent
