"""What the trainer made of each sampled token, on disk beside the rollouts.

One line per trained sequence and update: the rollout, its turns with their weights, where its
sampled tokens stand, and for each of them the trainer's log-prob and entropy (and a weight, where
the tokens of a turn differ in it). Numbers are little-endian float32 in base64: exact, and cheap to
write. Files are in blocks, as those of rollouts are.
"""

from __future__ import annotations

import warnings
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic.errors import SerializationError
from ludic.plumbing.records import check_schema, encode
from ludic.rollouts.block_writer import BlockFile
from ludic.rollouts.lines import CutFileWarning, keep_lines, parse_line, read_lines
from ludic.saw.items import SAWItem

SCHEMA = 1
"""The version of a line's layout; a line of a newer one is refused."""
_CHUNK = 64


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTokens:
    """One sequence as an update saw it.

    `turns` are (turn index, weight, number of its tokens), in order; `spans` are (position in the
    sequence, length) of the runs of sampled tokens. The arrays have one entry for each sampled
    token; `entropies` are those of the trainer's distribution. The log-probs are of the first pass
    over the sequence, so of the policy before this update unless it has several mini-batches.
    """

    update: int
    rollout_id: str
    turns: tuple[tuple[int, float, int], ...]
    spans: tuple[tuple[int, int], ...]
    weights: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]

    def at(self, turn: int, position: int, count: int) -> slice | None:
        """Where the tokens of a model call are in the arrays: `count` sampled tokens of `turn`
        that follow a prompt of length `position`. None where this sequence has no such call."""
        start = 0
        for first, length in self.spans:
            if first <= position and position + count <= first + length:
                found = start + position - first
                return slice(found, found + count) if self._turn_at(found) == turn else None
            start += length
        return None

    def _turn_at(self, place: int) -> int | None:
        for turn, _, count in self.turns:
            if place < count:
                return turn
            place -= count
        return None


@dataclass(frozen=True, slots=True, eq=False)
class UpdateTokens:
    """The tokens of one update, as the trainer hands them over; the arrays are the items' action
    tokens end to end."""

    update: int
    items: Sequence[SAWItem]
    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Some of an update's items: few enough for a block to stay small."""

    tokens: UpdateTokens
    first: int
    start: int

    def lines(self) -> bytes:
        """The items as lines; called in the writing thread."""
        tokens = self.tokens
        items = tokens.items[self.first : self.first + _CHUNK]
        # What can be found for all items at once is: each has few tokens.
        turns = [[(s.turn_index, float(s.weight), s.end - s.start) for s in i.turns] for i in items]
        spans = _spans([item.action_mask for item in items])
        bounds = [0, *accumulate(item.turns[-1].end for item in items)]
        here = slice(self.start, self.start + bounds[-1])
        logprobs, entropies = _bytes(tokens.logprobs[here]), _bytes(tokens.entropies[here])
        even = _bytes(_even([turn for own in turns for turn in own]))
        rows = []
        for at, item in enumerate(items):
            own = slice(4 * bounds[at], 4 * bounds[at + 1])
            weights = item.attachments.token_weights
            rows.append(
                {
                    "schema": SCHEMA,
                    "update": tokens.update,
                    "rollout": item.rollout_id,
                    "turns": turns[at],
                    "spans": spans[at],
                    "weights": ""
                    if weights is None
                    or (data := _bytes(weights)) == even[own]
                    or np.array_equal(weights, _even(turns[at]))  # 0 and -0 are equal
                    else _text(data),
                    "logprobs": _text(logprobs[own]),
                    "entropies": _text(entropies[own]),
                }
            )
        return b"".join([encode(row) + b"\n" for row in rows])


class TokenLog(BlockFile[_Chunk]):
    """Appends what the trainer computed to a file, in blocks, from a thread of its own."""

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        super().__init__(path, _Chunk.lines, append=append)

    def write(self, tokens: UpdateTokens) -> None:
        """Hands an update over; returns before it is encoded."""
        start = 0
        for first in range(0, len(tokens.items), _CHUNK):
            self._blocks.put(_Chunk(tokens, first, start))
            start += sum(i.turns[-1].end for i in tokens.items[first : first + _CHUNK])


def open_token_log(path: Path, update: int) -> TokenLog:
    """Returns a log that goes on after `update`: what it has of later ones is forgotten, since a
    resumed run repeats them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CutFileWarning)  # of an update that comes again
        if path.exists():
            keep_lines(path, lambda row: row["update"] <= update)
        return TokenLog(path, append=True)


def read_token_log(path: str | Path) -> Iterator[TrainedTokens]:
    """The sequences of a file that `TokenLog` wrote. One that breaks off is read up to there."""
    for number, (line, whole) in enumerate(read_lines(Path(path)), start=1):
        if whole:
            yield trained_tokens(parse_line(line, f"{path}, line {number}"))


def trained_tokens(row: Any) -> TrainedTokens:
    """One line, decoded."""
    check_schema(row, SCHEMA, "a line of a token log")
    try:
        turns = tuple((int(t), float(w), int(n)) for t, w, n in row["turns"])
        logprobs, entropies = _array(row["logprobs"]), _array(row["entropies"])
        weights = _array(row["weights"]) if row["weights"] else _even(turns)
        spans = tuple((int(a), int(b)) for a, b in row["spans"])
        sizes = {len(weights), len(logprobs), len(entropies), sum(length for _, length in spans)}
        if len(sizes) != 1:
            raise ValueError(f"arrays of lengths {sorted(sizes)}")
        return TrainedTokens(
            int(row["update"]), str(row["rollout"]), turns, spans, weights, logprobs, entropies
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise SerializationError(f"a damaged line of a token log: {exc!r}") from exc


def _even(turns: Sequence[tuple[int, float, int]]) -> NDArray[np.float32]:
    """The weights of tokens that all have their turn's."""
    return np.repeat(np.array([w for _, w, _ in turns], np.float32), [n for *_, n in turns])


def _spans(masks: Sequence[NDArray[np.int8]]) -> list[list[tuple[int, int]]]:
    """The runs of sampled tokens of each sequence."""
    starts = np.cumsum([0, *map(len, masks)])
    places = np.concatenate(masks).nonzero()[0]
    owners = starts.searchsorted(places, "right") - 1
    begins = np.ones(places.size, bool)
    begins[1:] = (places[1:] - places[:-1] > 1) | (owners[1:] != owners[:-1])
    firsts = begins.nonzero()[0]
    owners = owners[firsts]
    lengths = np.diff(firsts, append=places.size)
    found: list[list[tuple[int, int]]] = [[] for _ in masks]
    for owner, place, length in zip(
        owners.tolist(), (places[firsts] - starts[owners]).tolist(), lengths.tolist(), strict=True
    ):
        found[owner].append((place, length))
    return found


def _bytes(values: NDArray[np.float32]) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


def _text(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _array(text: str) -> NDArray[np.float32]:
    return np.frombuffer(b64decode(text, validate=True), dtype="<f4").astype(np.float32, copy=False)
