"""The environment: a game of the Game Boy, played in words."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import zip_longest
from math import dist
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from ludic.envs.gameboy.description import Shown, known_games, read_game
from ludic.envs.gameboy.emulator import BUTTONS, Emulator, load_pyboy, read_action, tools
from ludic.envs.gameboy.memory import Progress, Reader
from ludic.envs.gameboy.walking import MOVES, Cell, Ground, View, look
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError
from ludic.seeding import derive_seed
from ludic.types import Action, Info, Obs, StepOutcome

LONGEST_WALK = 100
"""After this many button presses, a walk stops where it is."""


@dataclass(eq=False, repr=False)
class GameBoyEnv(SingleAgentEnv):
    """A game by its ROM, which is yours: none comes with Ludic.

    An action is one or more buttons (`a`, `up up left`, `wait 60`), or `walk to X Y` over ground
    that was seen in the episode. The observation is text, read from the memory through the game's
    description; the milestones of the description give the rewards. One that the description says
    ends the game, or `goal`, ends the episode. What cannot be read as an action is not a move: the
    agent is told, and `info["illegal"]` is set.

    An episode begins with one of `states`, or with the game switched on. The same seed draws the
    same state and waits the same number of frames, so that a group begins on the same bits.

    Args:
        rom: The path of the ROM.
        game: A description that comes with Ludic, or the path of one; by default, that of the ROM.
        states: Paths of saved states; each seed draws one.
        jitter: Up to this many frames go by before the first observation; the seed decides. Games
            that count frames for chance then go differently.
        goal: A milestone that ends the episode.
        max_steps: After this many actions the episode is cut short.
        max_buttons: The longest sequence of buttons.
        tools: Whether the actions are offered as tools, too, for the agent `harness`.
        system_prompt: Suggested to the agent instead of a text about the actions.
    """

    isolation: ClassVar[Literal["thread", "process"]] = "process"

    rom: str
    _: KW_ONLY
    game: str | None = None
    states: Sequence[str] = ()
    jitter: int = 0
    goal: str | None = None
    max_steps: int = 1000
    max_buttons: int = 8
    tools: bool = False
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        load_pyboy()
        rom = _bytes(self.rom, "rom")
        self.description = read_game(self.game or _recognised(rom, self.rom))
        self._check(rom)
        self._starts = [(Path(path).stem, _bytes(path, "states")) for path in self.states]
        self._emulator = Emulator(rom)
        if not self._starts:
            self._emulator.run(self.description.boot)
            self._starts = [("start", self._emulator.snapshot())]
        self._reader = Reader(self.description)
        self._start = ""

    def _check(self, rom: bytes) -> None:
        game, sha1 = self.description, hashlib.sha1(rom).hexdigest()
        if sha1 != game.sha1:
            raise ConfigError(
                f"{self.rom} is not {game.title}: its SHA-1 is {sha1}, and not {game.sha1}"
            )
        if self.goal is not None and self.goal not in game.milestones:
            raise ConfigError(
                f"goal={self.goal!r} is not a milestone of {game.title}: "
                f"{', '.join(game.milestones)}"
            )
        if self.max_steps < 1 or self.max_buttons < 1 or self.jitter < 0:
            raise ConfigError(
                f"max_steps={self.max_steps} and max_buttons={self.max_buttons} must be at least 1,"
                f" jitter={self.jitter} at least 0"
            )

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        random = Random(derive_seed(secrets.randbits(63) if seed is None else seed, "start"))
        self._start, state = random.choice(self._starts)
        self._emulator.restore(state)
        if frames := random.randint(0, self.jitter):
            self._emulator.run(frames)
        self._ground, self._steps = Ground(), 0
        self._progress: Progress | None = None
        self._look()
        walking = self.description.grid is not None
        self._shown = self.env_current_obs()
        return self._shown, {"tools": tools(walking)} if self.tools else {}

    def env_step(self, action: Action) -> StepOutcome:
        self._steps += 1
        self._earned: dict[str, float] = {}
        self._reached = False
        asked = read_action(action, self.max_buttons)
        if asked is None:
            note = f"{action.strip()[:80]!r} is not an action. {self._actions_in_words()}"
        elif isinstance(asked, tuple):
            note = self._walk(asked)
        else:
            note = ""
            for button, frames in asked:
                if not self._reached:
                    self._press(button, frames)
        cut = not self._reached and self._steps >= self.max_steps
        info: dict[str, Any] = {"steps": self._steps, "frames": self._emulator.frames}
        info |= {"illegal": True} if asked is None else {}
        info |= {"result": "reached"} if self._reached else {"result": "cut"} if cut else {}
        self._shown = "\n".join(filter(None, (note, self.env_current_obs())))
        return StepOutcome(
            self._shown,
            sum(self._earned.values(), 0.0),
            terminated=self._reached,
            truncated=cut,
            info=info,
            reward_components=self._earned,
        )

    def env_current_obs(self) -> Obs:
        lines = [self.description.title]
        if self._view is not None:
            place, (x, y) = self._view.place, self._view.at
            columns = [x for x, _ in self._view.glyphs]
            lines = [f"{place}, x {x}, y {y}. Columns {min(columns)} to {max(columns)}:"]
            lines += self._view.drawn()
        if self._text:
            lines += ["On the screen:", *(f"  {row}" for row in self._text)]
        values = self._values
        lines += [_line(s, values) for s in self.description.show if not s.when or values[s.when]]
        return "\n".join(lines)

    def picture(self) -> str:
        both = zip_longest(self._emulator.picture(), self._shown.split("\n"))
        return "\n".join(f"{screen or '':80} {text or ''}".rstrip() for screen, text in both)

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        if self.system_prompt is not None:
            return self.system_prompt
        grid = self.description.grid
        marks = "".join(f", {mark.glyph} {mark.list}" for mark in grid.marks) if grid else ""
        drawn = f" On the map, @ is you, . can be walked on, # cannot{marks}." if grid else ""
        return f"You play {self.description.title}.{drawn} {self._actions_in_words()}"

    def task_key(self) -> str | None:
        return self._start

    def snapshot(self) -> bytes:
        """Returns the game as it is now; written to a file, it can be one of `states`."""
        return self._emulator.snapshot()

    def close(self) -> None:
        self._emulator.close()

    def _actions_in_words(self) -> str:
        walk = ", or say `walk to X Y`" if self.description.grid else ""
        return (
            f"Answer with one button or up to {self.max_buttons}: {', '.join(BUTTONS)}, wait{walk}."
        )

    def _press(self, button: str, frames: int = 0) -> None:
        if button == "wait":
            self._emulator.run(max(1, frames))
        else:
            self._emulator.press(button, self.description.press, self.description.settle)
        self._look()

    def _look(self) -> None:
        """Reads the game: what is shown, and what was newly reached."""
        emulator, grid = self._emulator, self.description.grid
        self._values = self._reader.values(emulator.read)
        tiles = self._reader.tiles(emulator.read)
        self._text = self._reader.screen_text(tiles)
        self._view: View | None = None
        if grid is not None and not self._text:  # text lies over the ground
            self._view = look(grid, self._values, tiles, emulator.read)
            self._ground.see(self._view)
        if self._progress is None:
            self._progress = Progress(self.description, self._values)
            return
        for name, reward in self._progress.update(self._values).items():
            self._earned[name] = self._earned.get(name, 0.0) + reward
            self._reached |= name == self.goal or self.description.milestones[name].ends

    def _walk(self, goal: Cell) -> str:
        """Walks until it arrives, something happens, or there is no way left; returns a note."""
        if self._view is None:
            return "You cannot walk now."
        place, before, blocked, tries = self._view.place, self._view.at, set[Cell](), 0
        for _ in range(LONGEST_WALK):
            view = self._view
            if view is None or view.place != place or dist(before, view.at) > 1:
                return "Something happened on the way."
            if (before := view.at) == goal or self._reached:
                return ""
            way = self._ground.way(place, before, goal, blocked)
            if way is None:
                return f"No way to {goal[0]} {goal[1]} is known."
            self._press(way[0])
            tries = tries + 1 if self._view is not None and self._view.at == before else 0
            if tries == 2:  # the first press may only have turned the player
                dx, dy = MOVES[way[0]]
                blocked.add((before[0] + dx, before[1] + dy))
                tries = 0
        return "The walk was long; you stopped on the way."


def _line(shown: Shown, values: dict[str, Any]) -> str:
    value = values[shown.field]
    entries = value if isinstance(value, list) else [value]
    texts = [
        shown.each.format(**entry) if isinstance(entry, dict) else shown.each.format(entry)
        for entry in entries
    ]
    return f"{shown.label}: {', '.join(texts) or shown.empty}"


def _recognised(rom: bytes, path: str) -> str:
    games, sha1 = known_games(), hashlib.sha1(rom).hexdigest()
    if sha1 not in games:
        raise ConfigError(
            f"{path}: no description has its SHA-1, {sha1} (there are {', '.join(games.values())})"
            ": set `game` to the file that describes it"
        )
    return games[sha1]


def _bytes(path: str, what: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{what}={path!r} cannot be read: {error.strerror}") from error
