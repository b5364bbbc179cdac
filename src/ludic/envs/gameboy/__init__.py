"""Game Boy games as environments: the emulator is PyBoy, and a game is a file that describes it.

`description` is what such a file says, `emulator` runs the game, `memory` reads it through its
description, `walking` knows the ground, and `env` puts them together and gives the rewards.
"""

from ludic.envs.gameboy.description import Game as Game
from ludic.envs.gameboy.description import read_game as read_game
from ludic.envs.gameboy.env import GameBoyEnv as GameBoyEnv
