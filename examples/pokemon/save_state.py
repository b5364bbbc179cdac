"""You play, and what you reached is saved: python examples/pokemon/save_state.py red.gb room.state

Type actions (`a`, `up up`, `wait 600`, `walk to 5 3`), and an empty line when you are there.
"""

import argparse
from pathlib import Path

from ludic.envs.gameboy import GameBoyEnv

parser = argparse.ArgumentParser(description="Play a game, and save a state to begin from.")
parser.add_argument("rom", help="the ROM")
parser.add_argument("state", type=Path, help="the file to write")
parser.add_argument("--game", help="the description, if the ROM's own is not built in")
parser.add_argument("--begin", action="append", default=[], help="a state to go on from")
args = parser.parse_args()

env = GameBoyEnv(args.rom, game=args.game, states=args.begin, max_steps=1_000_000)
env.reset(seed=0)
print(env.picture())
while action := input("> ").strip():
    env.env_step(action)
    print(env.picture())
args.state.write_bytes(env.snapshot())
env.close()
print(f"wrote {args.state}")
