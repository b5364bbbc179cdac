"""Rollouts on disk: one line of JSON each, in compressed files that survive a kill.

Every line is one row with plain columns (ids, seeds, rewards, lengths, the dialogue), which
`datasets` and pandas read as they stand, and a column `rollout` that holds the whole rollout as
JSON text, which nothing is lost from. Files that end in `.zst` or `.gz` are compressed in blocks of
whole lines, so that every block written before a run was killed stays readable. Prompts are stored
without what they repeat, so that a rollout grows linearly with its turns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from ludic.errors import ConfigError, SerializationError
from ludic.plumbing.records import Record, changed, check_schema, encode, plain_json
from ludic.rollouts.block_writer import BlockFile
from ludic.rollouts.lines import read_rows
from ludic.types import AgentStep, Message, Rollout, TokenTrace, VersionSpan, from_json, to_json

SCHEMA = 3
"""The version of the row's layout; a file of a newer one is refused. In the first, prompts were
stored whole; in the second, version spans had no attempt."""


class RolloutWriterLike(Protocol):
    """Whatever takes rollouts as they finish: `RolloutWriter`, for one."""

    def write(self, rollout: Rollout) -> None: ...


@runtime_checkable
class BufferedWriter(RolloutWriterLike, Protocol):
    """A writer that holds rollouts back for a while. A checkpoint counts only after `flush_async`
    has returned."""

    async def room(self) -> None: ...

    async def flush_async(self) -> None: ...


class EncodedRollouts(list[Rollout]):
    """Rollouts that come with the lines that they are in a file, made in another process."""

    def __init__(self, rollouts: Iterable[Rollout], lines: Sequence[bytes]) -> None:
        super().__init__(rollouts)
        self.lines = lines


class RolloutWriter(BlockFile[Rollout | bytes]):
    """Appends rollouts to a file, in blocks, from a thread of its own.

    The path's ending decides the format: `.jsonl.zst`, `.jsonl.gz` or plain `.jsonl`. An existing
    file is refused unless `append=True`; then a last line that is whole but for its end is
    completed, and what an earlier run left unfinished is cut off, with a `CutFileWarning`.

    A rollout is in the file within about a second; after `flush` or `close` it is on disk. An error
    of the disk is raised by the next call, and by `close`; a rollout that cannot be encoded is left
    out, with a warning, and counted in `lost`. At most `max_waiting`
    rollouts wait to be written: after that, `write` blocks. A coroutine awaits `room` first, and
    `flush_async`, or uses the writer in `async with`.
    """

    def __init__(self, path: str | Path, *, append: bool = False, max_waiting: int = 1024) -> None:
        if max_waiting < 1:
            raise ConfigError(f"max_waiting={max_waiting}: must be at least 1")
        super().__init__(path, _line_of, append=append, max_waiting=max_waiting)
        self.count = 0

    def write(self, rollout: Rollout) -> None:
        """Hands one rollout over to be written."""
        self._blocks.put(rollout)
        self.count += 1

    def write_line(self, line: bytes) -> None:
        """Hands one over as what `rollout_line` made of it."""
        self._blocks.put(line)
        self.count += 1

    async def room(self) -> None:
        """Waits until `write` will not block."""
        await self._blocks.room()


async def write_rollouts(writer: RolloutWriterLike, rollouts: Iterable[Rollout]) -> None:
    """Gives rollouts to a writer, without holding up the event loop while it has no room."""
    room = getattr(writer, "room", None)  # asking for a `BufferedWriter` takes ten times as long
    if room is not None:
        await room()
    if isinstance(rollouts, EncodedRollouts) and isinstance(writer, RolloutWriter):
        for line in rollouts.lines:
            writer.write_line(line)
        return
    for rollout in rollouts:
        writer.write(rollout)


def read_rollouts(
    path: str | Path, *, on_cut: Literal["warn", "error"] = "warn"
) -> Iterator[Rollout]:
    """The rollouts of a file that `RolloutWriter` wrote, one after the other.

    A file cut in the middle of a line is a `CutFileWarning`, and the rollouts before it count;
    with `on_cut="error"` it is an error. A broken line that others follow is always an error, and
    so is a newer schema.
    """
    for row, where in read_rows(path, "rollouts", on_cut=on_cut):
        yield rollout_from_row(row, where)


def _line_of(item: Rollout | bytes) -> bytes:
    return item if isinstance(item, bytes) else rollout_line(item)


def rollout_line(rollout: Rollout) -> bytes:
    """One line of a file, with its end."""
    row = rollout_row(rollout)
    try:
        return encode(row) + b"\n"
    except (TypeError, ValueError):  # a subclass of str, for one
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """One row of a file: columns of one type each, and the whole rollout as text. Empty text
    stands for none: readers that take a file in pieces guess a column's type from the first."""
    # One pass: asking the rollout for each of these would take one for every column.
    tokens = 0
    turns: set[int] = set()
    terminated = truncated = False
    truncation_reason = ""
    for step in rollout.steps:
        if isinstance(step, AgentStep):
            turns.add(step.turn_index)
            if step.trace is not None:
                tokens += len(step.trace.completion_token_ids)
            continue
        terminated = terminated or step.terminated
        if step.truncated:
            truncated = True
            truncation_reason = step.truncation_reason or ""
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
        "total_reward": reward if math.isfinite(reward := rollout.total_reward) else None,
        "num_turns": len(turns),
        "num_tokens": tokens,
        "terminated": terminated,
        "truncated": truncated,
        "truncation_reason": truncation_reason,
        "error": rollout.error or "",
        "messages": [{"role": m["role"], "content": m["content"]} for m in dialogue(rollout)],
        "rollout": _stored_json(without_repeats(rollout)).decode(),
    }


_Rest: TypeAlias = list[tuple[tuple[VersionSpan, ...], tuple[tuple[int, ...], ...] | None]]


def _stored_json(stored: StoredRollout) -> bytes:
    """What `to_json` returns. Ids and log-probs are not read back to see that they survive JSON,
    which takes as long as all the rest: a trace has checked them."""
    traces = [step.trace for step in stored.rollout.agent_steps if step.trace is not None]
    logprobs = [t.completion_logprobs for t in traces if type(t.completion_logprobs) is tuple]
    if {kind for values in logprobs for kind in map(type, values)} <= {float}:
        rest = [(trace.version_spans, trace.kept_token_ids) for trace in traces]
        bare = with_traces(stored.rollout, lambda _: None)
        if plain_json(bare, Rollout) and plain_json(rest, _Rest):
            return encode(stored)
    return to_json(stored)


def rollout_from_row(row: Any, where: str = "this row") -> Rollout:
    """The rollout in a row; `where` names it in errors."""
    check_schema(row, SCHEMA, where)
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
    for step in rollout.steps:
        if not isinstance(step, AgentStep):
            continue
        # What tools answered is listed with their call, and again as new to the call after it.
        repeated = bool(tools) and step.new_messages[: len(tools)] == tools
        messages.extend(step.new_messages[len(tools) if repeated else 0 :])
        messages.append(step.message)
        messages.extend(step.tool_messages)
        tools = step.tool_messages
    return messages


class StoredRollout(Record, frozen=True):
    """A rollout whose prompts lack their beginnings. `shared` says, for each model call that has a
    trace, how many tokens its prompt takes from the call before: prompt, then completion."""

    rollout: Rollout
    shared: tuple[int, ...]


def without_repeats(rollout: Rollout) -> StoredRollout:
    """Cuts from every prompt what it shares with the call before."""
    steps = list(rollout.steps)
    shared: list[int] = []
    before: TokenTrace | None = None
    for at, step in enumerate(steps):
        if not isinstance(step, AgentStep) or step.trace is None:
            continue
        trace = step.trace
        count = 0 if before is None else _shared_with(before, trace)
        if count:
            rest = changed(trace, prompt_token_ids=trace.prompt_token_ids[count:])
            steps[at] = changed(step, trace=rest)
        shared.append(count)
        before = trace
    kept = changed(rollout, steps=tuple(steps)) if any(shared) else rollout
    return StoredRollout(kept, tuple(shared))


def with_repeats(stored: StoredRollout) -> Rollout:
    """The inverse of `without_repeats`; raises `SerializationError` for impossible counts."""
    traces = [step.trace for step in stored.rollout.agent_steps if step.trace is not None]
    calls = [(trace.prompt_token_ids, trace.completion_token_ids) for trace in traces]
    prompts = iter(whole_prompts(calls, stored.shared))
    if not any(stored.shared):
        return stored.rollout
    return with_traces(
        stored.rollout, lambda trace: trace and changed(trace, prompt_token_ids=next(prompts))
    )


def whole_prompts(
    calls: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shared: Sequence[int]
) -> list[tuple[int, ...]]:
    """The prompts of calls of which the stored part of the prompt, and the completion, are given;
    raises `SerializationError` for impossible counts."""
    if len(shared) != len(calls):
        raise SerializationError(f"shared has {len(shared)} entries for {len(calls)} calls")
    if not any(shared):
        return [prompt for prompt, _ in calls]
    prompts: list[tuple[int, ...]] = []
    before: tuple[int, ...] = ()
    for number, ((prompt, completion), count) in enumerate(zip(calls, shared, strict=True)):
        if not 0 <= count <= len(before):
            raise SerializationError(
                f"call {number}: shared is {count}, but the call before it has {len(before)} tokens"
            )
        prompts.append(before[:count] + prompt if count else prompt)
        before = prompts[-1] + completion
    return prompts


def _shared_with(before: TokenTrace, trace: TokenTrace) -> int:
    if trace.extends(before):
        return len(before.prompt_token_ids) + len(before.completion_token_ids)
    return shared_length(before.token_ids, trace.prompt_token_ids)


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How long two sequences are the same from their beginning."""
    n = min(len(a), len(b))
    return n if a[:n] == b[:n] else next(i for i in range(n) if a[i] != b[i])


def with_traces(
    rollout: Rollout, change: Callable[[TokenTrace | None], TokenTrace | None]
) -> Rollout:
    """The rollout with what `change` makes of the trace of each model call, in order."""
    return rollout.labelled(
        steps=tuple(
            [
                changed(step, trace=change(step.trace)) if isinstance(step, AgentStep) else step
                for step in rollout.steps
            ]
        )
    )
