"""Frames and steps per second of a Game Boy game on one core: `python -m benchmarks.gameboy`.

The game is the one that the tests write. `frames_per_s` is the emulator alone, in batches of 24
frames, as many as a button takes in the Pokémon games, and the last of them drawn. A step of the
environment is a button and the observation after it, in this process (`env_steps_per_s`) and in
one of its own (`process_steps_per_s`). Each figure is the median of the rounds, in seconds of the
processor, so that other work on the machine does not count; the last is in seconds of the clock.
`reset_ms` is what going back to a state takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ludic.envs import build_env
from ludic.envs.gameboy import GameBoyEnv
from ludic.types import EnvSpec
from tests.envs.gameboy.rom import write_game

NEEDS = ("pyboy",)
FRAMES = 24


def rate(work: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    """Calls per second."""
    start = clock()
    for _ in range(times):
        work()
    return times / (clock() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the Game Boy environment.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--times", type=int, default=100, help="calls per round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        game = {**write_game(Path(folder)), "max_steps": 10**9}
        env = GameBoyEnv(**game)
        env.reset(seed=0)
        apart = build_env(EnvSpec("gameboy", game))
        apart.reset(seed=0)
        calls: dict[str, tuple[Callable[[], object], Callable[[], float]]] = {
            "batches": (lambda: env._emulator.run(FRAMES), time.process_time),
            "steps": (lambda: env.step({"agent": "down"}), time.process_time),
            "resets": (lambda: env.reset(seed=0), time.process_time),
            "process": (lambda: apart.step({"agent": "down"}), time.perf_counter),
        }
        figures: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.rounds):
            for name, (work, clock) in calls.items():
                figures[name].append(rate(work, args.times, clock))
        env.close()
        apart.close()
    found = {name: statistics.median(values) for name, values in figures.items()}
    result = {
        "frames_per_s": round(FRAMES * found["batches"]),
        "env_steps_per_s": round(found["steps"], 1),
        "process_steps_per_s": round(found["process"], 1),
        "reset_ms": round(1000 / found["resets"], 2),
    }
    for name, value in result.items():
        print(f"{name:20} {value:10,}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
