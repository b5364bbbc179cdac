"""Which tasks of reasoning-gym and which games of TextArena can be played here, without a network.

python -m tools.adapted             makes each, steps it once, and prints what it finds
python -m tools.adapted --write     writes the tables into docs/adapted_tasks.md

Run it in the environment of `make test-adapters`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ludic.envs.adapters.reasoning_gym import ReasoningGymEnv
from ludic.envs.adapters.textarena import TextArenaEnv
from ludic.errors import LudicError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "adapted_tasks.md"
LIMIT_S = 30
"""Of computing: what else the machine does must not decide what is in the tables."""
COMPOSITE = {"datasets": [{"name": "chain_sum", "weight": 1, "config": {}}]}


@dataclass(frozen=True)
class Tried:
    """The verdict on one task or game. `why` is empty if it could be created and stepped."""

    name: str
    why: str = ""
    notes: tuple[str, ...] = ()
    players: int = 1


class _Slow(Exception):
    """It took longer than the limit."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises `_Slow` inside once it has computed for so long. Only in the main thread."""

    def expire(number: int, frame: Any) -> None:
        raise _Slow

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def attempt(name: str, play: Callable[[], Tried], seconds: float = LIMIT_S) -> Tried:
    """What `play` found, or why it could not; quietly, and with the generators watched."""
    before = random.getstate(), str(np.random.get_state())
    try:
        with limit(seconds), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                found = play()
    except _Slow:
        return Tried(name, f"computes for more than {seconds:.0f} s before it begins")
    except LudicError as error:
        return Tried(name, _sentence(error))
    except Exception as error:
        return Tried(name, f"raises {type(error).__name__}: {_sentence(error)}")
    if (random.getstate(), str(np.random.get_state())) != before:
        return Tried(name, "draws from a generator of the whole process")
    return found


def try_task(name: str) -> Tried:
    """One question of a task twice, a wrong answer to it, and its own answer."""

    from reasoning_gym.factory import has_curriculum

    def play() -> Tried:
        config = COMPOSITE if name == "composite" else None
        questions = set()
        for _ in range(2):
            env = ReasoningGymEnv(name, config=config, size=10)
            questions.add(env.env_reset(seed=1)[0])
        if len(questions) > 1:
            return Tried(name, "asks something else for the same seed")
        notes = []
        answer = env._entry.get("answer")
        if "score_error" in env.env_step("no answer at all").info:
            notes.append("its scoring raises for some wrong answers, which score 0")
        env.env_reset(seed=1)
        score = env.env_step(str(answer)).reward
        if answer is None:
            notes.append("has no answer of its own to compare with")
        elif score != 1.0:
            notes.append(f"gives its own answer {score:g}")
        if not has_curriculum(name):
            notes.append("has no levels")
        return Tried(name, notes=tuple(notes))

    return attempt(name, play)


def try_game(name: str) -> Tried:
    """The opening of a game twice, and one move."""

    def play() -> Tried:
        seen = []
        for _ in range(2):
            env = TextArenaEnv(name)
            opening = env.reset(seed=1)
            outcomes = env.step({env.active_agents[0]: "[0]"})
            seen.append(str((opening, outcomes)))
        notes = () if seen[0] == seen[1] else ("not the same for the same seed",)
        return Tried(name, notes=notes, players=len(env.agent_ids))

    return attempt(name, play)


def tasks() -> list[str]:
    """Every task of reasoning-gym."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def games() -> list[str]:
    """One game of each class in TextArena: the ids differ in size and wrappers only."""
    from textarena.envs.registration import ENV_REGISTRY

    found: dict[Any, str] = {}
    for name, spec in ENV_REGISTRY.items():
        found.setdefault(spec.entry_point, name)
    return sorted(found.values())


def as_page(answers: Sequence[Tried], played: Sequence[Tried]) -> str:
    """The page of tables."""
    python = ".".join(map(str, sys.version_info[:2]))
    good, ok = [t for t in answers if not t.why], [t for t in played if not t.why]
    lines = [
        "# What can be played",
        "",
        "Which tasks of reasoning-gym and which games of TextArena work through the",
        "[adapters](adapters.md). Each task, and one game of each class, was created without a",
        "network, reset twice with one seed, and stepped, by `python -m tools.adapted --write`,",
        f"with Python {python}, reasoning-gym {version('reasoning-gym')} and TextArena "
        f"{version('textarena')}.",
        "",
        "## reasoning-gym",
        "",
        f"{len(good)} of {len(answers)} tasks work:",
        ", ".join(f"`{t.name}`" for t in good) + ".",
        "",
        *_table("task", answers),
        "## TextArena",
        "",
        f"{len(ok)} of {len(played)} games work. Players are the smallest number.",
        "",
        "| players | games |",
        "|---|---|",
    ]
    for players in sorted({t.players for t in ok}):
        names = ", ".join(f"`{t.name}`" for t in ok if t.players == players)
        lines.append(f"| {players} | {names} |")
    return "\n".join([*lines, "", *_table("game", played)]).rstrip() + "\n"


def working(page: str) -> tuple[list[str], list[str]]:
    """The tasks and the games that a written page says work."""
    answers, _, played = page.partition("## TextArena")
    listed = re.search(r"tasks work:\n(.*)\n", answers)
    rows = re.findall(r"^\| \d+ \| (.*) \|$", played, re.M)
    found = [
        re.findall(r"`([^`]+)`", line) for line in (listed[1] if listed else "", " ".join(rows))
    ]
    return found[0], found[1]


def _table(what: str, tried: Sequence[Tried]) -> list[str]:
    rows = [(t.name, t.why, "no") for t in tried if t.why]
    rows += [(t.name, "; ".join(t.notes), "yes") for t in tried if t.notes and not t.why]
    if not rows:
        return []
    head = [f"| {what} | works | what to know |", "|---|---|---|"]
    return [*head, *(f"| `{name}` | {works} | {said} |" for name, said, works in rows), ""]


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    text = re.sub(r"(/[\w.-]+)+/", "", text)
    return text if len(text) <= 200 else f"{text[:200]}…"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    answers: list[Tried] = []
    played: list[Tried] = []
    for names, play, into in ((tasks(), try_task, answers), (games(), try_game, played)):
        for name in names:
            began = time.monotonic()
            found = play(name)
            into.append(found)
            said = found.why or "; ".join(found.notes) or "works"
            print(f"{name:40} {time.monotonic() - began:6.1f} s  {said}", flush=True)
    if write:
        PAGE.write_text(as_page(answers, played), encoding="utf-8")


if __name__ == "__main__":
    main()
