"""Tic-Tac-Toe: the rules and perfect play, an environment for one agent against a seeded opponent,
one for two agents against each other, and a teacher.

A board is a string of nine cells, row by row: "X", "O" or ".". X always begins.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

from ludic.envs.env import LudicEnv
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError, EnvError
from ludic.seeding import derive_seed
from ludic.types import Action, Info, Obs, StepOutcome

Mark: TypeAlias = Literal["X", "O"]
Board: TypeAlias = str

EMPTY: Final[Board] = "........."
CELLS: Final = ("A1", "B1", "C1", "A2", "B2", "C2", "A3", "B3", "C3")
"""Column A to C, row 1 to 3, in the board's order."""

LINES: Final = (
    (0, 1, 2), (3, 4, 5), (6, 7, 8),
    (0, 3, 6), (1, 4, 7), (2, 5, 8),
    (0, 4, 8), (2, 4, 6),
)  # fmt: skip

_PLACES: Final = {name: place for place, name in enumerate(CELLS)}
_CORNERS = ("A1", "C1", "A3", "C3")

Opponent = Literal["random", "perfect", "mixed"]

_RULES = (
    "You play Tic-Tac-Toe as {mark}. X moves first. Three in a row, column or diagonal win. "
    "Columns are A, B, C and rows are 1, 2, 3. Answer with one free cell, such as B2."
)


def other(mark: Mark) -> Mark:
    return "O" if mark == "X" else "X"


def to_move(board: Board) -> Mark:
    """Whose turn it is: X begins, then they alternate."""
    return "X" if board.count("X") == board.count("O") else "O"


def free_cells(board: Board) -> tuple[int, ...]:
    return tuple(place for place, mark in enumerate(board) if mark == ".")


def winner(board: Board) -> Mark | None:
    for a, b, c in LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return "X" if board[a] == "X" else "O"
    return None


def is_over(board: Board) -> bool:
    return winner(board) is not None or "." not in board


def play(board: Board, place: int) -> Board:
    """The board after the player to move marks the free cell `place`."""
    return board[:place] + to_move(board) + board[place + 1 :]


def read_cell(text: str) -> int | None:
    """The place of the cell that a text names ("B2", in either case), or None."""
    return _PLACES.get(text.strip().upper()) if len(text) < 100 else None


def draw(board: Board) -> str:
    """The board with the names of its columns and rows, short enough for a small model."""
    rows = (f"{1 + row} " + " ".join(board[3 * row : 3 * row + 3]) for row in range(3))
    return "  A B C\n" + "\n".join(rows)


@cache
def value(board: Board) -> int:
    """What the position is worth to the player to move, under perfect play of both.

    Positive is a win, negative a loss, 0 a draw; sooner wins and later losses are worth more.
    """
    if winner(board) is not None:
        return -1 - board.count(".")
    if "." not in board:
        return 0
    return max(-value(play(board, place)) for place in free_cells(board))


@cache
def best_cells(board: Board) -> tuple[int, ...]:
    """The moves that keep the position's value, in the board's order."""
    best = value(board)
    return tuple(place for place in free_cells(board) if -value(play(board, place)) == best)


@dataclass(eq=False, repr=False, kw_only=True)
class _Scored:
    """What both environments have in common: their rewards, and a board."""

    win_reward: float = 1.0
    draw_reward: float = 0.0
    loss_reward: float = -1.0
    illegal_reward: float = -1.0
    illegal_ends: bool = True

    def __post_init__(self) -> None:
        self._rewards = {"win": self.win_reward, "draw": self.draw_reward, "loss": self.loss_reward}
        for name, reward in {**self._rewards, "illegal": self.illegal_reward}.items():
            if not math.isfinite(reward):
                raise ConfigError(
                    f"{type(self).__name__}({name}_reward={reward!r}): must be finite"
                )
        self._board: Board = EMPTY
        self._over = True

    @property
    def return_range(self) -> tuple[float, float]:
        """The lowest and the highest return of an episode, for either player. Where an illegal move
        does not end the game, there may be any number of them."""
        rewards, illegal = self._rewards.values(), self.illegal_reward
        if self.illegal_ends:
            return min(*rewards, illegal), max(*rewards, illegal)
        low = -math.inf if illegal < 0 else min(rewards)
        return low, math.inf if illegal > 0 else max(rewards)

    @property
    def board(self) -> Board:
        """The nine cells, row by row: "X", "O" or "."."""
        return self._board

    def _end(self, mark: Mark) -> StepOutcome:
        result = _result_for(mark, self._board)
        info = {"board": self._board, "result": result}
        shown = _view(mark, self._board)
        return StepOutcome(shown, self._rewards[result], terminated=True, info=info)

    def _complain(self, mark: Mark, action: Action, place: int | None) -> StepOutcome:
        """An illegal move, which may end the game."""
        self._over = self.illegal_ends
        info: dict[str, Any] = {"board": self._board, "illegal_move": True}
        if self._over:
            info["result"] = "illegal"
        shown = action if len(action) <= 20 else action[:20] + "..."
        what = f"{shown!r} is no cell." if place is None else f"{CELLS[place]} is taken."
        obs = f"{what} The game is over." if self._over else f"{what}\n{_view(mark, self._board)}"
        return StepOutcome(obs, self.illegal_reward, terminated=self._over, info=info)


@dataclass(eq=False, repr=False, kw_only=True)
class TicTacToeEnv(_Scored, SingleAgentEnv):
    """The agent plays against a built-in opponent, whose moves come from the seed.

    The action is the name of a free cell ("B2"). Anything else is an illegal move: it earns
    `illegal_reward` and leaves the board as it is; the game then ends, or, with
    `illegal_ends=False`, the agent moves again.

    Args:
        opponent: "random" moves anywhere, "perfect" never loses, "mixed" plays a perfect move
            with probability `perfect_prob` and a random one otherwise.
        mark: The agent's mark; "random" lets the seed choose. X begins.
    """

    blocking: ClassVar[bool] = False

    opponent: Opponent = "random"
    perfect_prob: float = 0.5
    mark: Mark | Literal["random"] = "X"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice("opponent", self.opponent, get_args(Opponent))
        _check_choice("mark", self.mark, ("X", "O", "random"))
        if not 0 <= self.perfect_prob <= 1:
            raise ConfigError(
                f"TicTacToeEnv(perfect_prob={self.perfect_prob!r}): must be in [0, 1]"
            )
        chances = {"random": 0.0, "perfect": 1.0, "mixed": self.perfect_prob}
        self._perfect_chance = chances[self.opponent]
        self._mark: Mark = "X"
        self._random = Random(0)

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        if seed is None:
            seed = secrets.randbits(63)
        drawn: Mark = "X" if derive_seed(seed, "mark") % 2 else "O"
        self._mark = drawn if self.mark == "random" else self.mark
        self._random = Random(derive_seed(seed, "opponent"))
        self._board = EMPTY
        if self._mark == "O":
            self._opponent_moves()
        return self.env_current_obs(), {"mark": self._mark, "board": self._board}

    def env_step(self, action: Action) -> StepOutcome:
        place = read_cell(action)
        if place is None or self._board[place] != ".":
            return self._complain(self._mark, action, place)
        self._board = play(self._board, place)
        if not is_over(self._board):
            self._opponent_moves()
        if is_over(self._board):
            return self._end(self._mark)
        return StepOutcome(self.env_current_obs(), 0.0, info={"board": self._board})

    def env_current_obs(self) -> Obs:
        return _view(self._mark, self._board)

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        # The mark is in every observation: with "random" it differs between episodes.
        return _RULES.replace("as {mark}", "against an opponent")

    def _opponent_moves(self) -> None:
        # One draw decides who moves and one decides where, whatever the opponent: runs that
        # differ only in `perfect_prob` stay comparable.
        perfect = self._random.random() < self._perfect_chance
        cells = best_cells(self._board) if perfect else free_cells(self._board)
        self._board = play(self._board, cells[int(self._random.random() * len(cells))])


class TwoPlayerTicTacToeEnv(_Scored, LudicEnv[Mark, Obs, Action]):
    """Two agents, "X" and "O", take turns. Both hear the end, each with its own reward.

    Who moved hears nothing more until the other has moved. An illegal move earns its player
    `illegal_reward`; it ends the game, which the other then gets `draw_reward` for, or, with
    `illegal_ends=False`, the player moves again.
    """

    blocking: ClassVar[bool] = False

    @property
    def agent_ids(self) -> Sequence[Mark]:
        return ("X", "O")

    @property
    def active_agents(self) -> Sequence[Mark]:
        return () if self._over else (to_move(self._board),)

    def reset(self, *, seed: int | None = None) -> Mapping[Mark, tuple[Obs, Info]]:
        self._board = EMPTY
        self._over = False
        return {"X": (_view("X", EMPTY), {}), "O": ("X moves first.", {})}

    def step(self, actions: Mapping[Mark, Action]) -> Mapping[Mark, StepOutcome]:
        if self._over:
            raise EnvError("TwoPlayerTicTacToeEnv was stepped after the game ended: reset it first")
        mover = to_move(self._board)
        action = actions[mover]
        place = read_cell(action)
        if place is None or self._board[place] != ".":
            return self._illegal(mover, action, place)
        self._board = play(self._board, place)
        self._over = is_over(self._board)
        if not self._over:
            info = {"board": self._board}
            return {
                mover: StepOutcome("", 0.0, info=info),
                other(mover): StepOutcome(_view(other(mover), self._board), 0.0, info=info),
            }
        return {mark: self._end(mark) for mark in self.agent_ids}

    def current_obs(self) -> Mapping[Mark, Obs]:
        return {mark: _view(mark, self._board) for mark in self.agent_ids}

    def suggested_sysprompt(self, agent_id: Mark) -> str | None:
        return _RULES.format(mark=agent_id)

    def _illegal(
        self, mover: Mark, action: Action, place: int | None
    ) -> Mapping[Mark, StepOutcome]:
        complaint = self._complain(mover, action, place)
        if not self._over:
            return {mover: complaint}
        told = f"{mover} made an illegal move. The game is void."
        info = {"board": self._board, "result": "void"}
        void = StepOutcome(told, self._rewards["draw"], terminated=True, info=info)
        return {mover: complaint, other(mover): void}


def _result_for(mark: Mark, board: Board) -> Literal["win", "draw", "loss"]:
    won = winner(board)
    return "draw" if won is None else "win" if won == mark else "loss"


def _view(mark: Mark, board: Board) -> Obs:
    if is_over(board):
        closing = {"win": "You win.", "draw": "Draw.", "loss": "You lose."}
        return f"You are {mark}.\n{draw(board)}\n{closing[_result_for(mark, board)]}"
    free = " ".join(CELLS[place] for place in free_cells(board))
    return f"You are {mark}.\n{draw(board)}\nFree: {free}"


def _check_choice(option: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"TicTacToeEnv({option}={value!r}): must be one of {', '.join(allowed)}")


def random_legal(obs: str, rng: Random) -> str:
    """A teacher that shows how to answer, and not how to win: a sentence that names a free cell of
    the board in `obs`, and what kind of cell it is."""
    free = [cell for cell in obs.rpartition("Free:")[2].split() if cell in CELLS]
    cell = rng.choice(free)
    kind = "centre" if cell == "B2" else "corner" if cell in _CORNERS else "edge"
    return f"I take the {kind} {cell}."
