"""One rollout, whole: what was said, what happened, and every token with its credit; and the
attempts of a group beside each other. What a token says is for the run's own tokenizer."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from ludic.errors import LudicError
from ludic.inference.tiny import byte_symbols
from ludic.rollouts.lines import parse_line, read_block
from ludic.rollouts.storage import rollout_from_row, shared_length
from ludic.rollouts.token_log import TrainedTokens, trained_tokens
from ludic.types import AgentStep, EnvironmentStep, Rollout
from ludic.view.folders import RunPlace, ViewError
from ludic.view.queries import members


def rollout_page(
    run: RunPlace, db: sqlite3.Connection, identity: str, texts: TokenTexts | None
) -> dict[str, Any]:
    """Everything about a rollout that the page shows."""
    rollout = read_rollout(run, db, identity)
    trained = read_trained(run, db, identity)
    ids: set[int] = set()
    steps = list(_steps(rollout, trained, ids))
    return {
        "id": rollout.id,
        "episode": rollout.episode_id,
        "agent": rollout.agent_id,
        "group": rollout.group_id,
        "task": rollout.task_key,
        "parent": rollout.parent_id,
        "env": {"kind": rollout.env.kind, "kwargs": rollout.env.kwargs} if rollout.env else None,
        "protocol": rollout.protocol.kind if rollout.protocol else None,
        "env_seed": None if rollout.env_seed is None else str(rollout.env_seed),
        "sampling_seed": None if rollout.sampling_seed is None else str(rollout.sampling_seed),
        "error": rollout.error,
        "meta": dict(rollout.meta),
        "reward": rollout.total_reward,
        "terminated": rollout.terminated,
        "truncated": rollout.truncated,
        "truncation": rollout.truncation_reason,
        "tokens": rollout.num_tokens,
        "updates": sorted({record.update for record in trained}),
        "trained_tokens": sum(len(record.logprobs) for record in trained),
        "steps": steps,
        "texts": texts.of(ids) if texts else {},
        "special": sorted(texts.special & ids) if texts else [],
        "same_group": members(db, "grp", rollout.group_id or ""),
        "same_episode": members(db, "episode", rollout.episode_id),
        "children": members(db, "parent", rollout.id),
    }


def read_rollout(run: RunPlace, db: sqlite3.Connection, identity: str) -> Rollout:
    """The rollout of that id, from its file."""
    row = db.execute(
        "SELECT block, line FROM rollouts WHERE id = ? ORDER BY n DESC LIMIT 1", (identity,)
    ).fetchone()
    if row is None:
        raise ViewError(f"there is no rollout {identity!r} in {run.name}")
    line = _block(run, db, row["block"]).split(b"\n")[row["line"]]
    try:
        return rollout_from_row(parse_line(line, identity), identity)
    except LudicError as exc:
        raise ViewError(str(exc)) from exc


def read_trained(run: RunPlace, db: sqlite3.Connection, identity: str) -> list[TrainedTokens]:
    """What the trainer made of the rollout; of the last update that saw it."""
    rows = db.execute(
        "SELECT block, line FROM trained WHERE rollout = ? AND upd = (SELECT max(upd) FROM trained "
        "WHERE rollout = ?) ORDER BY block, line",
        (identity, identity),
    ).fetchall()
    records, blocks = [], dict[int, list[bytes]]()
    for row in rows:
        try:
            if row["block"] not in blocks:
                blocks[row["block"]] = _block(run, db, row["block"]).split(b"\n")
            records.append(trained_tokens(json.loads(blocks[row["block"]][row["line"]])))
        except (LudicError, ValueError, IndexError):
            continue  # the conversation is worth showing without it
    return records


def _block(run: RunPlace, db: sqlite3.Connection, block: int) -> bytes:
    row = db.execute(
        "SELECT name, start, length FROM blocks JOIN files ON files.id = blocks.file "
        "WHERE blocks.id = ?",
        (block,),
    ).fetchone()
    path = run.confined(run.path / row["name"])
    try:
        return read_block(path, row["start"], row["length"])
    except (OSError, ValueError) as exc:
        raise ViewError(f"{row['name']} was rewritten: load the page again ({exc})") from exc


def _steps(
    rollout: Rollout, trained: list[TrainedTokens], ids: set[int]
) -> Iterator[dict[str, Any]]:
    before: tuple[int, ...] = ()
    for step in rollout.steps:
        if isinstance(step, EnvironmentStep):
            yield _environment(step)
            continue
        tokens = None
        if step.trace is not None:
            tokens = _tokens(step, before, trained)
            ids.update(step.trace.prompt_token_ids, step.trace.completion_token_ids)
            before = step.trace.token_ids
        yield {
            "kind": "agent",
            "turn": step.turn_index,
            "new_messages": list(step.new_messages),
            "message": step.message,
            "finish_reason": step.finish_reason,
            "fork": {"reason": step.fork.reason, "detail": step.fork.detail} if step.fork else None,
            "tool_messages": list(step.tool_messages),
            "tool_errors": list(step.tool_call_errors),
            "sampling": {k: v for k, v in step.sampling.items() if k != "seed"},
            "tokens": tokens,
        }


def _tokens(
    step: AgentStep, before: tuple[int, ...], trained: list[TrainedTokens]
) -> dict[str, Any]:
    trace = step.trace
    assert trace is not None
    count, prompt = len(trace.completion_token_ids), len(trace.prompt_token_ids)
    versions: list[int] | None = None
    if trace.version_spans:
        versions = [s.version for s in trace.version_spans for _ in range(s.end - s.start)]
    tokens: dict[str, Any] = {
        "prompt": list(trace.prompt_token_ids),
        "repeated": shared_length(before, trace.prompt_token_ids),
        "completion": list(trace.completion_token_ids),
        "logprobs": list(trace.completion_logprobs) if trace.completion_logprobs else None,
        "versions": versions,
        "trained": False,
    }
    places = [(r, at) for r in trained if (at := r.at(step.turn_index, prompt, count)) is not None]
    if places and count:
        # Calls of one turn may have prompts of one length, in several sequences: the sampler's
        # log-probs tell which is whose.
        sampled = np.array(trace.completion_logprobs or 0.0)
        record, place = min(places, key=lambda p: float(abs(p[0].logprobs[p[1]] - sampled).sum()))
        tokens |= {
            "trained": True,
            "update": record.update,
            "weights": record.weights[place].tolist(),
            "trainer_logprobs": record.logprobs[place].tolist(),
            "entropies": record.entropies[place].tolist(),
        }
    return tokens


def _environment(step: EnvironmentStep) -> dict[str, Any]:
    same = ("obs", "action", "next_obs", "reward", "terminated", "truncated", "stepped")
    return {name: getattr(step, name) for name in same} | {
        "kind": "environment",
        "turn": step.turn_index,
        "acted": bool(step.agent_steps),
        "components": dict(step.reward_components),
        "truncation": step.truncation_reason,
        "info": dict(step.info),
    }


MOST_ATTEMPTS = 32
_LONGEST = 20_000


def group_page(run: RunPlace, db: sqlite3.Connection, group: str) -> dict[str, Any]:
    """The attempts with their turns; `parting` is the first turn in which they are not all the
    same, by role."""
    rows = members(db, "grp", group, MOST_ATTEMPTS)
    if not rows:
        raise ViewError(f"there is no group {group!r} in {run.name}")
    attempts = []
    for row in rows:
        rollout = read_rollout(run, db, row["id"])
        attempts.append({**row, "turns_shown": _turns(rollout), "first": _first(rollout)})
    parting: dict[str, int | None] = {}
    for role in dict.fromkeys(row["agent"] for row in rows):
        played = [attempt["turns_shown"] for attempt in attempts if attempt["agent"] == role]
        texts = [[turn["text"] for turn in turns] for turns in played]
        parting[role] = _parting(texts)
        for turns in played:
            _mark_common(turns, texts)
    return {"group": group, "attempts": attempts, "parting": parting}


def _turns(rollout: Rollout) -> list[dict[str, Any]]:
    shown = []
    for turn in rollout.turns():
        text = "\n".join(step.message["content"] for step in turn.agent_steps)
        step: EnvironmentStep | None = turn.env_step
        shown.append(
            {
                "turn": turn.index,
                "text": text[:_LONGEST],
                "cut": len(text) > _LONGEST,
                "calls": [
                    call["function"]["name"]
                    for s in turn.agent_steps
                    for call in s.message.get("tool_calls", ())
                ],
                "action": step.action if step else None,
                "parse_error": bool(step and step.info.get("parse_error")),
                "compacted": turn.compacted,
                "next_obs": step.next_obs[:_LONGEST] if step else None,
                "reward": turn.reward,
                "common": 0,
            }
        )
    return shown


def _first(rollout: Rollout) -> str:
    """What the agent was shown before its first words."""
    for step in rollout.agent_steps:
        users = [m["content"] for m in step.new_messages if m["role"] != "system"]
        return "\n".join(users)[:_LONGEST]
    return ""


def _parting(texts: Sequence[Sequence[str]]) -> int | None:
    return next((n for n, turns in enumerate(zip_longest(*texts)) if len(set(turns)) > 1), None)


def _mark_common(turns: list[dict[str, Any]], texts: Sequence[Sequence[str]]) -> None:
    """Notes for each turn how many characters all attempts share at its start, until they part."""
    for number, turn in enumerate(turns):
        others = [each[number] for each in texts if number < len(each)]
        turn["common"] = min(shared_length(others[0], other) for other in others)
        if len(set(others)) > 1 or len(others) < len(texts):
            break


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_LARGEST = 128 << 20


class TokenTexts:
    """The text of every token of one tokenizer. Bytes that are not a whole character are shown
    as such, `\\xe2\\x96`, so that nothing looks like a replacement character and is not one."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        text = path.read_text(encoding="utf-8")
        self._tokenizer = Tokenizer.from_str(text)
        self._piece = _piece_reader(json.loads(text))
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self.special = {number for number, token in added.items() if token.special}

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """The texts of these ids."""
        return {number: self.text(number) for number in set(ids)}

    def text(self, number: int) -> str:
        """The text of one id."""
        if (added := self._added.get(number)) is not None:
            return added
        piece = self._tokenizer.id_to_token(number) if number >= 0 else None
        return f"⟨{number}⟩" if piece is None else self._piece(piece)


def _piece_reader(data: Any) -> Callable[[str], str]:
    decoder = json.dumps(data.get("decoder"))
    if "ByteLevel" in decoder:
        table = {char: byte for byte, char in enumerate(byte_symbols())}

        def byte_level(piece: str) -> str:
            if all(c in table for c in piece):
                return readable(bytes(table[c] for c in piece))
            return piece

        return byte_level

    def spaced(piece: str) -> str:
        if byte := _BYTE.fullmatch(piece):
            return readable(bytes([int(byte[1], 16)]))
        return piece.replace("\u2581", " ")

    return spaced


def readable(data: bytes) -> str:
    """UTF-8 as text, and everything else as escapes."""
    return data.decode("utf-8", "backslashreplace")


def texts_of(run: RunPlace) -> TokenTexts | None:
    """The texts of the run's tokenizer: beside the rollouts, or with a checkpoint. None if there is
    none, or it cannot be read."""
    saved = (run.path / "checkpoints").glob("*/step-*/model/tokenizer.json")
    for path in (run.path / "rollouts" / "tokenizer.json", *sorted(saved, reverse=True)):
        with suppress(ViewError, OSError):
            real = run.confined(path)
            stat = real.stat()
            if stat.st_size < _LARGEST and (texts := _read(real, stat.st_mtime)) is not None:
                return texts
    return None


@lru_cache(maxsize=32)
def _read(path: Path, modified: float) -> TokenTexts | None:
    try:
        return TokenTexts(path)
    except Exception:  # whatever is wrong with it, the ids can be shown
        return None
