"""Rollouts on disk: one line of JSON each, in compressed files that survive a kill.

Every line is one row with plain columns (ids, seeds, rewards, lengths, the dialogue), which
`datasets` and pandas read as they stand, and a column `rollout` that holds the whole rollout as
JSON text, which nothing is lost from. Files that end in `.gz` hold one gzip member per rollout, so
that whatever was written before a run was killed stays readable.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

from ludic.errors import ConfigError, SchemaVersionError, SerializationError
from ludic.types import Message, Rollout, from_json, to_json

SCHEMA = 1
"""The version of the row's layout; a file of a newer one is refused."""

_CHUNK = 1 << 16


class CutFileWarning(UserWarning):
    """A file ends in the middle of a line: what stands before it was read."""


class RolloutWriter:
    """Writes each rollout at once, whole or not at all as far as the system allows.

    A path that ends in `.gz` is compressed. An existing file is refused unless `append=True`;
    then a line that an earlier run left unfinished is cut off first, with a `CutFileWarning`.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.path = Path(path)
        self.count = 0
        self._compress = self.path.suffix == ".gz"
        if self.path.exists() and not append:
            raise ConfigError(
                f"{self.path} exists: choose another path, or RolloutWriter(path, append=True)"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _cut_off_unfinished(self.path)
        self._file: BinaryIO | None = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def write(self, rollout: Rollout) -> None:
        """Appends one rollout and hands it to the operating system."""
        if self._file is None:
            raise SerializationError(f"{self.path} was written to after it was closed")
        line = json.dumps(rollout_row(rollout), ensure_ascii=False).encode() + b"\n"
        data = memoryview(gzip.compress(line, compresslevel=5, mtime=0) if self._compress else line)
        while data:
            data = data[self._file.write(data) :]
        self.count += 1

    def sync(self) -> None:
        """Waits until what was written is on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RolloutReader:
    """The rollouts of a file, read anew each time it is iterated over.

    `cut` says whether the last pass found the file cut in the middle of a line. By default that
    is a `CutFileWarning` and the rollouts before it count; `on_cut="error"` raises. A broken line
    that others follow is always an error, and so is a newer schema.
    """

    def __init__(self, path: str | Path, *, on_cut: Literal["warn", "error"] = "warn") -> None:
        self.path = Path(path)
        self.on_cut = on_cut
        self.cut = False

    def __iter__(self) -> Iterator[Rollout]:
        self.cut = False
        lines = read_lines(self.path)
        for number, (line, whole) in enumerate(lines, start=1):
            where = f"{self.path}, line {number}"
            if not whole:
                self._note_cut(where, number - 1, lost=bool(line))
                return
            yield rollout_from_row(parse_line(line, where), where)

    def _note_cut(self, where: str, read: int, *, lost: bool) -> None:
        self.cut = True
        what = "the file ends in the middle of this line" if lost else "the file breaks off here"
        message = f"{where}: {what}; the {read} rollouts before it are whole and were read"
        if self.on_cut == "error":
            raise SerializationError(message)
        warnings.warn(message, CutFileWarning, stacklevel=3)


def read_rollouts(path: str | Path, *, on_cut: Literal["warn", "error"] = "warn") -> RolloutReader:
    """The rollouts of a file that `RolloutWriter` wrote, one after the other."""
    return RolloutReader(path, on_cut=on_cut)


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """One row of a file: columns of one type each, and the whole rollout as text. Empty text
    stands for none: readers that take a file in pieces guess a column's type from the first."""
    reward = rollout.total_reward
    return {
        "schema": SCHEMA,
        "id": rollout.id,
        "episode_id": rollout.episode_id,
        "agent_id": rollout.agent_id,
        "group_id": rollout.group_id or "",
        "task_key": rollout.task_key or "",
        "parent_id": rollout.parent_id or "",
        "env": rollout.env.kind if rollout.env else "",
        "protocol": rollout.protocol.kind if rollout.protocol else "",
        "env_seed": rollout.env_seed,
        "sampling_seed": rollout.sampling_seed,
        # Readers of JSON in general know no NaN; the exact value is in `rollout`.
        "total_reward": float(reward) if math.isfinite(reward) else None,
        "num_turns": len({step.turn_index for step in rollout.agent_steps}),
        "num_tokens": rollout.num_tokens,
        "terminated": rollout.terminated,
        "truncated": rollout.truncated,
        "truncation_reason": rollout.truncation_reason or "",
        "error": rollout.error or "",
        "messages": [{"role": m["role"], "content": m["content"]} for m in dialogue(rollout)],
        "rollout": to_json(rollout).decode(),
    }


def rollout_from_row(row: Any, where: str = "this row") -> Rollout:
    """The rollout in a row; `where` names it in errors."""
    if not isinstance(row, dict) or not isinstance(row.get("schema"), int):
        raise SerializationError(f"{where}: no stored rollout: it has no schema number")
    if row["schema"] > SCHEMA:
        raise SchemaVersionError(
            f"{where}: schema {row['schema']}, and this version of Ludic reads up to {SCHEMA}: "
            "update Ludic to read it"
        )
    try:
        return from_json(Rollout, row["rollout"])
    except (KeyError, SerializationError) as exc:
        raise SerializationError(f"{where}: {exc}") from exc


def dialogue(rollout: Rollout) -> list[Message]:
    """All messages of the rollout in the order in which they came, each once."""
    messages: list[Message] = []
    tools: tuple[Message, ...] = ()
    for step in rollout.agent_steps:
        # What tools answered is listed with their call, and again as new to the call after it.
        repeated = bool(tools) and step.new_messages[: len(tools)] == tools
        messages.extend(step.new_messages[len(tools) if repeated else 0 :])
        messages.append(step.message)
        messages.extend(step.tool_messages)
        tools = step.tool_messages
    return messages


def read_lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """The lines of a file, compressed or not, each with whether it is whole. Only the last can be
    broken; a compressed file that is damaged in the middle raises `SerializationError`."""
    rest = b""
    broken = False
    for chunk, intact in _chunks(path):
        broken = broken or not intact
        rest += chunk
        *lines, rest = rest.split(b"\n")
        yield from ((line, True) for line in lines if line.strip())
    if rest.strip() or broken:
        yield rest, not broken and _is_json(rest)


def _chunks(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Decompressed pieces; the last one is not intact when the compressed data breaks off."""
    with open(path, "rb") as file:
        if path.suffix != ".gz":
            while data := file.read(_CHUNK):
                yield data, True
            return
        for _, text, whole in _members(file, path):
            yield text, whole


def _members(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Pieces of text with the offset at which their gzip member begins; the last one of a file
    that breaks off within a member is not whole."""
    start, data = 0, b""
    while data or (data := file.read(_CHUNK)):
        inflate = zlib.decompressobj(wbits=31)
        used = 0
        while not inflate.eof:
            if not data and not (data := file.read(_CHUNK)):
                yield start, b"", False
                return
            try:
                text = inflate.decompress(data)
            except zlib.error as exc:
                raise SerializationError(f"{path}: damaged after byte {start}: {exc}") from exc
            used += len(data) - len(inflate.unused_data)
            data = inflate.unused_data
            if text:
                yield start, text, True
        start += used


def _cut_off_unfinished(path: Path) -> None:
    """Removes what a killed run left behind the last whole line, so that lines can follow."""
    size = path.stat().st_size
    keep = _whole_bytes(path)
    if keep == size:
        return
    warnings.warn(
        f"{path}: an unfinished line of {size - keep} bytes at its end was cut off",
        CutFileWarning,
        stacklevel=3,
    )
    os.truncate(path, keep)


def _whole_bytes(path: Path) -> int:
    with open(path, "rb") as file:
        if path.suffix == ".gz":
            for start, _, whole in _members(file, path):
                if not whole:
                    return start
            return path.stat().st_size
        end = 0
        position = 0
        while data := file.read(_CHUNK):
            newline = data.rfind(b"\n")
            if newline >= 0:
                end = position + newline + 1
            position += len(data)
        return end


def parse_line(line: bytes, where: str) -> Any:
    """One line as JSON; `where` names it in errors."""
    try:
        return json.loads(line)
    except ValueError as exc:
        raise SerializationError(f"{where}: not JSON: {exc}") from exc


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
