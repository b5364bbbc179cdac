"""The cold start: supervised training on the moves of `generate_synth_data.py`.

    python examples/tic_tac_toe/sft_tic_tac_toe.py
    python examples/tic_tac_toe/sft_tic_tac_toe.py --model Qwen/Qwen2.5-0.5B-Instruct --lr 1e-5

The default model is tiny, with random weights, and runs on any CPU. Its tokenizer has
the game's words as tokens, so a position is about fifty tokens long. The result is a folder with
model and tokenizer, which the other scripts here take as --model. The default data is created
first if it is missing.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.inference import HFChatTemplate
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.training import OfflineBatchSource, Trainer, TrainerConfig, make_sft
from ludic.training.metrics.loggers import ConsoleLogger

MOVES = Path("runs/tic_tac_toe/moves.jsonl")
CELLS = [column + row for row in "123" for column in "ABC"]
WORDS = [
    *("system\n", "user\n", "assistant\n", "\n", "<move>", "</move>", " X", " O", " ."),
    *("You are X.", "You are O.", "\n  A B C", "\n1", "\n2", "\n3", "\nFree:"),
    "You play Tic-Tac-Toe. Answer with one free cell, such as <move>B2</move>.",
    *CELLS,
    *(f" {cell}" for cell in CELLS),
]


def load(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer: the tiny one, or any from a folder or the hub."""
    if name == "tiny":
        tokenizer = tiny_tokenizer(words=WORDS)
        model = tiny_model(
            vocab_size=len(tokenizer), hidden_size=128, kv_heads=4, initializer_range=0.1
        )
        return model, tokenizer
    return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Supervised cold start for Tic-Tac-Toe.")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--data", type=Path, default=MOVES)
    parser.add_argument("--output", type=Path, default=Path("runs/tic_tac_toe/sft"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    if args.data == MOVES and not MOVES.exists():
        script = Path(__file__).with_name("generate_synth_data.py")
        subprocess.run([sys.executable, script, "--output", MOVES], check=True)
    model, tokenizer = load(args.model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    algorithm = make_sft()
    trainer = Trainer(
        model=model,
        algo=algorithm,
        batch_source=OfflineBatchSource(
            args.data,
            chat_template=HFChatTemplate(tokenizer),
            algorithm=algorithm,
            batch_size=args.batch_size,
        ),
        cfg=TrainerConfig(
            learning_rate=args.lr,
            schedule="linear",
            total_steps=args.steps,
            max_seq_len=512,
            run_dir=args.output / "log",
        ),
        loggers=[ConsoleLogger(["train/nll"], every=max(args.steps // 10, 1))],
    )
    trainer.train_sync(args.steps)
    trainer.close()
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"saved to {args.output}")


if __name__ == "__main__":
    main()
