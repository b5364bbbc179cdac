"""Tic-Tac-Toe: against a seeded opponent, or with an agent on each side."""

from ludic.envs.tic_tac_toe.env import TicTacToeEnv, TwoPlayerTicTacToeEnv

__all__ = ["TicTacToeEnv", "TwoPlayerTicTacToeEnv"]
