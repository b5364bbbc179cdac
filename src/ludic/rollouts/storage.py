"""Rollouts on disk: one line of JSON each, in compressed files that survive a kill.

Every line is one row with plain columns (ids, seeds, rewards, lengths, the dialogue), which
`datasets` and pandas read as they stand, and a column `rollout` that holds the whole rollout as
JSON text, which nothing is lost from. Files that end in `.gz` hold one gzip member per rollout, so
that whatever was written before a run was killed stays readable.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ludic.errors import ConfigError, SchemaVersionError, SerializationError
from ludic.rollouts.lines import CutFileWarning, as_stored, mend_last_line, parse_line, read_lines
from ludic.rollouts.stored_prompts import StoredRollout, with_repeats, without_repeats
from ludic.types import Message, Rollout, from_json, to_json

SCHEMA = 2
"""The version of the row's layout; a file of a newer one is refused. In the first, prompts were
stored whole."""


class RolloutWriter:
    """Writes each rollout at once, whole or not at all as far as the system allows.

    A path that ends in `.gz` is compressed. An existing file is refused unless `append=True`;
    then a last line that is whole but for its end is completed, and one that an earlier run left
    unfinished is cut off, with a `CutFileWarning`.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.path = Path(path)
        self.count = 0
        if self.path.exists() and not append:
            raise ConfigError(
                f"{self.path} already exists: choose another path, or RolloutWriter(path, "
                "append=True)"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            mend_last_line(self.path)
        self._file: BinaryIO | None = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def write(self, rollout: Rollout) -> None:
        """Appends one rollout, past any buffer in this process."""
        if self._file is None:
            raise SerializationError(f"{self.path} was written to after it was closed")
        line = json.dumps(rollout_row(rollout), ensure_ascii=False).encode() + b"\n"
        data = memoryview(as_stored(self.path, line))
        while data:
            data = data[self._file.write(data) :]
        self.count += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rollouts(
    path: str | Path, *, on_cut: Literal["warn", "error"] = "warn"
) -> Iterator[Rollout]:
    """The rollouts of a file that `RolloutWriter` wrote, one after the other.

    A file cut in the middle of a line is a `CutFileWarning`, and the rollouts before it count;
    with `on_cut="error"` it is an error. A broken line that others follow is always an error, and
    so is a newer schema.
    """
    for number, (line, whole) in enumerate(read_lines(Path(path)), start=1):
        where = f"{path}, line {number}"
        if whole:
            yield rollout_from_row(parse_line(line, where), where)
            continue
        what = "the file ends in the middle of this line" if line else "the file breaks off here"
        message = f"{where}: {what}; the {number - 1} rollouts before it are whole and were read"
        if on_cut == "error":
            raise SerializationError(message)
        warnings.warn(message, CutFileWarning, stacklevel=2)


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
        "rollout": to_json(without_repeats(rollout)).decode(),
    }


def rollout_from_row(row: Any, where: str = "this row") -> Rollout:
    """The rollout in a row; `where` names it in errors."""
    if not isinstance(row, dict) or not isinstance(row.get("schema"), int):
        raise SerializationError(f"{where}: not a stored rollout: it has no schema number")
    if row["schema"] > SCHEMA:
        raise SchemaVersionError(
            f"{where}: schema {row['schema']}, and this version of Ludic reads up to {SCHEMA}: "
            "update Ludic to read it"
        )
    try:
        if row["schema"] < 2:
            return from_json(Rollout, row["rollout"])
        return with_repeats(from_json(StoredRollout, row["rollout"]))
    except KeyError as exc:
        raise SerializationError(f"{where}: it has no column {exc}") from exc
    except SerializationError as exc:
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
