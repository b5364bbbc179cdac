"""Tic-Tac-Toe: against a seeded opponent, or with an agent on each side."""

from ludic.envs.tic_tac_toe.env import TicTacToeEnv as TicTacToeEnv
from ludic.envs.tic_tac_toe.env import TwoPlayerTicTacToeEnv as TwoPlayerTicTacToeEnv
