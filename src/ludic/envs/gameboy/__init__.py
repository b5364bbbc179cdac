"""Game Boy games as environments: the emulator is PyBoy, and a game is a file that describes it.

`description` is what such a file says, `memory` reads a running game through it, `walking` knows
the ground, `milestones` gives the rewards, and `env` puts them together.
"""

from ludic.envs.gameboy.description import Game as Game
from ludic.envs.gameboy.description import read_game as read_game
from ludic.envs.gameboy.env import GameBoyEnv as GameBoyEnv
