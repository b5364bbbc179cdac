"""Games of TextArena, for one player and for several."""

from __future__ import annotations

import json
import numbers
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import Any, Literal

from ludic.envs.adapters import load_package, plain
from ludic.envs.adapters.episode_random import EpisodeRandom, give_own_random
from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, EnvError, UnknownNameError
from ludic.types import AgentID, Info, Obs, StepOutcome

MAX_PLAYERS = 15

_importing = threading.Lock()
_fewest: dict[str, int] = {}


class _Misfit(ConfigError):
    """The game is for another number of players."""


@dataclass(eq=False, repr=False)
class TextArenaEnv(LudicEnv[AgentID, Obs, str]):
    """A game of TextArena by its `id`; the players are `player_0`, `player_1` and so on.

    The rewards are the game's own, and come with its end, for all players at once. `info` then has
    what the game says of each player: its role, the reason, whether an invalid move ended it. A
    game that stops at its turn limit has ended: TextArena scores it like any other ending. An
    invalid move keeps the turn once; the second in a row ends the game, by the game's own rules.

    The package draws from the global generators. Here each episode has its own, so that episodes
    in one process do not disturb each other, nor anything else.

    Args:
        id: As `textarena.make` takes it. The ids without a suffix show each player the whole
            history, those with `-train` only some of it.
        players: How many play; by default the smallest number that the game takes.
        observation: "new" shows a player what was added since it last looked, where the text
            only grew; "all" everything each time.
        make: Further arguments of the game, such as `{"max_turns": 5}`.
    """

    id: str
    _: KW_ONLY
    players: int | None = None
    observation: Literal["new", "all"] = "new"
    make: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.observation not in ("new", "all"):
            raise ConfigError(f"observation={self.observation!r}: must be 'new' or 'all'")
        self._textarena = load_package("textarena", "textarena")
        self._make = dict(self.make or {})
        self._random = EpisodeRandom(0)
        self._players = self.players or self._fewest_players()
        self._game: Any = None
        self._turn = 0
        self._shown: dict[int, str] = {}
        self._seen: dict[int, str] = {}
        self._over = True

    @property
    def agent_ids(self) -> Sequence[AgentID]:
        return tuple(f"player_{number}" for number in range(self._players))

    @property
    def active_agents(self) -> Sequence[AgentID]:
        return () if self._over else (f"player_{self._turn}",)

    def reset(self, *, seed: int | None = None) -> Mapping[AgentID, tuple[Obs, Info]]:
        self._random = EpisodeRandom(seed)
        self._shown, self._seen = {}, {}
        with self._random.drawn_from():
            # A new one each time: its wrappers keep the history of earlier episodes.
            self._game = self._new_game(self._players, seed)
            self._over = False
            obs = self._look()
        return {f"player_{self._turn}": (obs, {})}

    def step(self, actions: Mapping[AgentID, str]) -> Mapping[AgentID, StepOutcome]:
        if self._over:
            raise EnvError(f"{self.id} was stepped after the game ended: reset it first")
        mover = f"player_{self._turn}"
        with self._random.drawn_from():
            done, info = self._game.step(actions[mover])
            if done:
                return self._ending()
            obs = self._look()
        outcomes = {mover: StepOutcome("", 0.0, info=plain(info or {}))}
        now = f"player_{self._turn}"
        outcomes[now] = StepOutcome(obs, 0.0, info=outcomes[mover].info if now == mover else {})
        return outcomes

    def current_obs(self) -> Mapping[AgentID, Obs]:
        return {f"player_{number}": text for number, text in self._seen.items()}

    def _look(self) -> Obs:
        """What the player whose turn it is sees now."""
        self._turn, text = self._game.get_observation()
        text = text if isinstance(text, str) else _as_text(text)
        before = self._shown.get(self._turn, "")
        self._shown[self._turn] = text
        new = text[len(before) :] if text.startswith(before) and self.observation == "new" else text
        self._seen[self._turn] = new.strip("\n")
        return self._seen[self._turn]

    def _ending(self) -> Mapping[AgentID, StepOutcome]:
        self._over = True
        rewards, facts = self._game.close()
        outcomes: dict[AgentID, StepOutcome] = {}
        for number, agent in enumerate(self.agent_ids):
            reward = (rewards or {}).get(number)
            if not isinstance(reward, numbers.Real):
                raise EnvError(f"{self.id} ended with {reward!r} as the reward of {agent}")
            info = plain(facts.get(number) or {})
            self._seen[number] = str(info.get("reason") or "")
            outcomes[agent] = StepOutcome(
                self._seen[number], float(reward), terminated=True, info=info
            )
        return outcomes

    def _new_game(self, players: int, seed: int | None) -> Any:
        """Returns a game that has begun. If it cannot, the error is one sentence; a wrong number of
        players is a `_Misfit`."""
        registry = self._textarena.envs.registration.ENV_REGISTRY
        if self.id not in registry:
            raise UnknownNameError("game of TextArena", self.id, registry)
        place = registry[self.id].entry_point
        try:
            if isinstance(place, str):
                with _importing:
                    import_module(place.partition(":")[0])
                    give_own_random("textarena")
            game = self._textarena.make(self.id, **self._make)
        except SyntaxError as error:
            version = ".".join(map(str, sys.version_info[:2]))
            raise ConfigError(
                f"{self.id} is not written for Python {version} ({error}): a newer one may take it"
            ) from error
        except (FileNotFoundError, ImportError, LookupError, TypeError, ValueError) as error:
            raise self._cannot(error) from error
        try:
            game.reset(num_players=players, seed=seed)
        except (AssertionError, ValueError) as error:
            raise _Misfit(f"{self.id} is not for {players} players: {error}") from error
        except (FileNotFoundError, LookupError, TypeError) as error:
            raise self._cannot(error) from error
        return game

    def _cannot(self, error: Exception) -> ConfigError:
        if isinstance(error, LookupError) and "nltk" in str(error):
            return ConfigError(
                f"{self.id} needs data of nltk that is not on this machine: fetch it with "
                f"nltk.download{_wanted_data(error)} where there is a network"
            )
        return ConfigError(f"TextArena cannot make {self.id!r}: {error}")

    def _fewest_players(self) -> int:
        """Tries it out, once per game: TextArena does not say."""
        game = f"{self.id} {json.dumps(self._make, sort_keys=True)}"
        if game in _fewest:
            return _fewest[game]
        with self._random.drawn_from():
            for players in range(1, MAX_PLAYERS + 1):
                with suppress(_Misfit):
                    self._new_game(players, 0)
                    return _fewest.setdefault(game, players)
        raise ConfigError(f"{self.id} takes no number of players from 1 to {MAX_PLAYERS}")


def _as_text(messages: Any) -> str:
    """The messages that a `-raw` game hands out, and forgets."""
    return "".join(
        f"\n[{'GAME' if sender < 0 else f'Player {sender}'}] {text}" for sender, text, _ in messages
    )


def _wanted_data(error: LookupError) -> str:
    lines = str(error).splitlines()
    return next((line.partition("download")[2] for line in lines if "nltk.download(" in line), "()")
