"""Rejection sampling: play, keep the games that were won, and store them as training data.

    python examples/rejection_sampling.py
    python examples/tic_tac_toe/sft_tic_tac_toe.py --model runs/tic_tac_toe/sft \\
        --data runs/tic_tac_toe/won.jsonl.zst --output runs/tic_tac_toe/imitation

The default model is the one of `tic_tac_toe/sft_tic_tac_toe.py`, which is created first if it is
missing. The file has complete rollouts, token by token, and `datasets` reads its plain columns.
`ludic generate RUN --keep success` does the same for any run.
"""

import argparse
import asyncio
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.inference import HFChatTemplate, InferenceSpec, LocalChatClient, SamplingConfig
from ludic.interaction import Runtime
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest, RolloutWriter

GAME = RolloutRequest(
    env=EnvSpec("tic_tac_toe", {"opponent": "mixed", "mark": "random"}),
    protocol=ProtocolSpec(
        "single_agent",
        {
            "system_prompt": "You play Tic-Tac-Toe. Answer with one free cell, such as "
            "<move>B2</move>.",
            "parser": {"kind": "xml", "tag": "move"},
            "context": {"kind": "windowed", "max_turns": 1},
        },
    ),
)


COLD_START = Path("runs/tic_tac_toe/sft")


async def sample(args: argparse.Namespace) -> None:
    """Streams rollouts past the filter into the file."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    inference = InferenceSpec(SamplingConfig(temperature=1.0, max_tokens=8))
    async with LocalChatClient(model, tokenizer, max_context_tokens=256) as client:
        runtime = Runtime(client, HFChatTemplate(tokenizer), args.model, inference)
        engine = RolloutEngine(runtime=runtime, seed=args.seed)
        with RolloutWriter(args.output) as writer:
            async for rollout in engine.stream_rollouts([GAME] * args.games, max_steps=6):
                if rollout.error is None and rollout.total_reward > args.above:
                    writer.write(rollout)
    print(f"kept {writer.count} of {args.games} games in {args.output}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Keeps the games that a model won.")
    parser.add_argument("--model", default=str(COLD_START))
    parser.add_argument("--games", type=int, default=500)
    parser.add_argument("--above", type=float, default=0.0, help="keep returns above this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/tic_tac_toe/won.jsonl.zst"))
    args = parser.parse_args()
    if args.model == str(COLD_START) and not COLD_START.exists():
        script = Path(__file__).parent / "tic_tac_toe" / "sft_tic_tac_toe.py"
        subprocess.run([sys.executable, script, "--output", COLD_START], check=True)
    asyncio.run(sample(args))


if __name__ == "__main__":
    main()
