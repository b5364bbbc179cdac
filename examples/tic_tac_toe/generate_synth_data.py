"""Synthetic games for a cold start: a teacher plays legal moves at random, and each is one row.

    python examples/tic_tac_toe/generate_synth_data.py --games 300 --output moves.jsonl

The teacher knows the rules but not how to win: the rows teach how to answer. They are plain
messages, so that any model's tokenizer can read them.
"""

import argparse
import json
from pathlib import Path
from random import Random

from ludic.envs import TicTacToeEnv

SYSTEM = "You play Tic-Tac-Toe. Answer with one free cell, such as <move>B2</move>."


def play(seed: int) -> list[dict[str, list[dict[str, str]]]]:
    """One game against the random opponent: a row for every move of ours."""
    rng, rows, over = Random(seed), [], False
    env = TicTacToeEnv(opponent="random", mark="random")
    obs, _ = env.env_reset(seed=seed)
    while not over:
        move = rng.choice(obs.rpartition("Free:")[2].split())
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": obs},
            {"role": "assistant", "content": f"<move>{move}</move>"},
        ]
        rows.append({"messages": messages})
        outcome = env.env_step(move)
        obs, over = outcome.obs, outcome.terminated
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes synthetic Tic-Tac-Toe moves.")
    parser.add_argument("--games", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/tic_tac_toe/moves.jsonl"))
    args = parser.parse_args()

    rows = [row for game in range(args.games) for row in play(args.seed + game)]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"wrote {len(rows)} moves of {args.games} games to {args.output}")


if __name__ == "__main__":
    main()
