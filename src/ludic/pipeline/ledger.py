"""The trainer's books: which units were asked for, and which are settled. Pure data.

Every unit has a number. It is *outstanding* from when it is asked for until it is settled: trained
on, or dropped with a reason. The books are saved with every checkpoint, so that the checkpoint
says what its weights have been trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeAlias

from msgspec import structs

from ludic.errors import CheckpointError, ConfigError
from ludic.pipeline.messages import Unit
from ludic.rollouts.requests import Curriculum, RolloutRequest
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.rollout_batch_source import RequestFeed, RequestFn
from ludic.types import Rollout, from_json, to_json

SCHEMA = 1
Requests: TypeAlias = tuple[RolloutRequest, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """The requests of a unit. One that is put back stands in for the unit number `of`."""

    requests: Requests
    of: int | None = None


@dataclass(slots=True)
class Ledger:
    """`low` is the first number that is not settled, `settled` are those above it that are.
    `waiting` are requests without a number yet. `trained` and `dropped` count units."""

    next: int = 0
    low: int = 0
    settled: set[int] = field(default_factory=set)
    outstanding: dict[int, Asked] = field(default_factory=dict)
    waiting: list[Asked] = field(default_factory=list)
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def number(self, asked: Asked) -> int:
        """Gives requests the next number; from then on they are outstanding."""
        number = self.next
        self.outstanding[number] = asked
        self.next += 1
        return number

    def unit(
        self, number: int, *, max_steps: int, policy: int, newest: tuple[int, int] = (0, 0)
    ) -> Unit:
        """An outstanding unit as it is sent, for the policy of that serial number or a newer one,
        and for the attempt and version that are the `newest`. Ids and the seeds that requests leave
        open follow from its number, whichever actor runs it, and however often."""
        asked, prefix = self.outstanding[number], f"unit-{number}"
        requests = tuple(
            r if r.group_id is None else structs.replace(r, group_id=prefix) for r in asked.requests
        )
        return Unit(number, requests, prefix, max_steps, policy, *newest)

    def is_settled(self, number: int) -> bool:
        return number < self.low or number in self.settled

    def in_order(self) -> Iterator[int]:
        """Outstanding numbers, the oldest first."""
        return (n for n in range(self.low, self.next) if n not in self.settled)

    def train(self, numbers: Sequence[int]) -> None:
        """Settles units that are trained on."""
        for number in numbers:
            self._settle(number)
        self.trained += len(numbers)

    def drop(self, number: int, reason: str) -> None:
        """Settles a unit that is not trained on; its requests come again as another unit, once."""
        asked = self.outstanding[number]
        self._settle(number)
        self.dropped[reason] += 1
        repeated = any(a.of == number for a in (*self.outstanding.values(), *self.waiting))
        if not repeated:
            self.waiting.insert(0, Asked(asked.requests, number))

    def _settle(self, number: int) -> None:
        del self.outstanding[number]
        self.settled.add(number)
        while self.low in self.settled:
            self.settled.remove(self.low)
            self.low += 1

    def catch_up(self, until: int, notes: Mapping[int, str]) -> None:
        """Enters what a lost trainer did after these books were saved: the units that it asked for,
        and those that it dropped. `notes` are the server's notes on them; what is not put back
        comes from `waiting`."""
        while self.next < until:
            of = stands_in_for(notes.get(self.next, ""))
            if of is not None and of in self.outstanding:
                self.number(Asked(self.outstanding[of].requests, of))
            else:
                self.number(self.waiting.pop(0))
        for number in list(self.in_order()):
            kind, _, rest = notes.get(number, "").partition(":")
            if kind == "x" and rest:
                self.drop(number, rest.split(":")[0])

    def state_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "schema": SCHEMA,
            "next": self.next,
            "low": self.low,
            "settled": sorted(self.settled),
            "outstanding": {str(n): _plain(asked) for n, asked in self.outstanding.items()},
            "waiting": [_plain(asked) for asked in self.waiting],
            "trained": self.trained,
            "dropped": dict(self.dropped),
        }

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> Ledger:
        """Raises `CheckpointError` for a state that is not a ledger's."""
        try:
            if state["schema"] > SCHEMA:
                raise CheckpointError(
                    f"the books of this run have schema {state['schema']}, and this version of "
                    f"Ludic reads up to {SCHEMA}: update Ludic"
                )
            return Ledger(
                next=int(state["next"]),
                low=int(state["low"]),
                settled=set(map(int, state["settled"])),
                outstanding={int(n): _asked(a) for n, a in state["outstanding"].items()},
                waiting=[_asked(a) for a in state["waiting"]],
                trained=int(state["trained"]),
                dropped=Counter({str(k): int(v) for k, v in state["dropped"].items()}),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise CheckpointError(f"not the state of a PipelineBatchSource: {exc!r}") from exc


def stands_in_for(note: str) -> int | None:
    """The number that a unit was put back for, in the server's note on it."""
    kind, *rest = note.split(":")
    of = rest[-1] if kind in ("q", "d", "x") and len(rest) >= 2 else ""
    return int(of) if of.isdigit() else None


def _plain(asked: Asked) -> dict[str, Any]:
    return {"requests": [to_json(r).decode() for r in asked.requests], "of": asked.of}


def _asked(data: Mapping[str, Any]) -> Asked:
    requests = tuple(from_json(RolloutRequest, text) for text in data["requests"])
    return Asked(requests, None if data["of"] is None else int(data["of"]))


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may be between actors and trainer. `groups` counts units from when they are asked
    for until a checkpoint has what became of them; None: as many as one checkpoint interval and
    the lag need. `bytes` bounds the finished groups: beyond it actors begin no new unit."""

    groups: int | None = None
    bytes: int = 2**30

    def __post_init__(self) -> None:
        if self.bytes < 1 or (self.groups is not None and self.groups < 1):
            raise ConfigError(f"{self}: both must be at least 1")

    def checked(self, groups_per_update: int, checkpoint_every: int, max_lag: int) -> Bounds:
        """The same with `groups` filled in; raises if they could never hold an interval."""
        interval = checkpoint_every * groups_per_update
        if self.groups is None:
            return replace(self, groups=interval + (1 + max_lag) * groups_per_update)
        if self.groups < interval:
            raise ConfigError(
                f"a bound of {self.groups} groups is below the {interval} of one checkpoint "
                f"interval ({checkpoint_every} updates of {groups_per_update} groups), and groups "
                "are kept until a checkpoint has them: raise it (pipeline.max_groups), or save "
                "more often"
            )
        return self


class UnitFeed:
    """Requests from a function or a curriculum, as the units of one update at a time."""

    def __init__(
        self, source: RequestFn | Curriculum, algorithm: RLAlgorithm, rollouts_per_update: int
    ) -> None:
        self._feed = RequestFeed(source, algorithm, None, rollouts_per_update)
        size = algorithm.group_size or self._feed.strategy.group_size
        self.groups_per_update = rollouts_per_update // size
        self._rollouts_per_update = rollouts_per_update
        self._draws = 0

    async def draw(self) -> list[Asked]:
        """The units of the next update."""
        requests = await self._feed.next(self._draws)
        expanded = self._feed.expand(requests, f"draw-{self._draws}/")
        places = [(r.group_id or f"\0{i}", r) for i, r in enumerate(expanded)]
        units = [Asked(tuple(r for _, r in unit)) for _, unit in groupby(places, lambda p: p[0])]
        if len(units) != self.groups_per_update:
            raise ConfigError(
                f"request_fn and the strategy make {len(units)} groups for update {self._draws}, "
                f"and rollouts_per_update={self._rollouts_per_update} is "
                f"{self.groups_per_update}: make them agree"
            )
        self._draws += 1
        return units

    def report(self, rollouts: Sequence[Rollout]) -> None:
        """Tells the curriculum how it went."""
        self._feed.report(rollouts)

    def state_dict(self) -> Mapping[str, Any]:
        return {"draws": self._draws, "requests": self._feed.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            draws, requests = int(state["draws"]), state["requests"]
        except (KeyError, TypeError, ValueError) as exc:
            raise CheckpointError(f"not the state of a pipeline's requests: {exc!r}") from exc
        self._feed.load_state_dict(requests)
        self._draws = draws
