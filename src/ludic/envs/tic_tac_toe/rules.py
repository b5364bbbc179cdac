"""The rules of Tic-Tac-Toe, and perfect play.

A board is a string of nine cells, row by row: "X", "O" or ".". X always begins.
"""

from __future__ import annotations

from functools import cache
from typing import Final, Literal, TypeAlias

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
