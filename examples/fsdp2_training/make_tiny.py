"""A tiny model and easy rows, to try `train_math_fsdp2.py` without a GPU.

    python examples/fsdp2_training/make_tiny.py --output runs/tiny_math

The folder gets a model that answers every problem with some number in a box, and `rows.jsonl`.
"""

import argparse
import json
from pathlib import Path
from random import Random

from ludic.envs import MATHEnv
from ludic.inference import HFChatTemplate
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.training import OfflineBatchSource, Trainer, TrainerConfig, make_sft


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a tiny model and rows for it.")
    parser.add_argument("--output", type=Path, default=Path("runs/tiny_math"))
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    rng = Random(0)
    sums = [(rng.randint(1, 4), rng.randint(1, 4)) for _ in range(64)]
    rows = [{"problem": f"${a} + {b}$ = ?", "answer": str(a + b)} for a, b in sums]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (args.output / "rows.jsonl").write_text(text, encoding="utf-8")

    tokenizer, algorithm = tiny_tokenizer(), make_sft()
    model = tiny_model(hidden_size=64, heads=2, kv_heads=1)  # vLLM on a CPU wants heads of 32
    shown = [
        {
            "messages": [
                {"role": "system", "content": MATHEnv.default_system_prompt},
                {"role": "user", "content": row["problem"]},
                {"role": "assistant", "content": f"\\boxed{{{rng.randint(2, 8)}}}"},
            ]
        }
        for row in rows
    ]
    trainer = Trainer(
        model=model,
        algo=algorithm,
        batch_source=OfflineBatchSource(
            shown, chat_template=HFChatTemplate(tokenizer), algorithm=algorithm, batch_size=16
        ),
        cfg=TrainerConfig(learning_rate=3e-3, max_seq_len=256),
    )
    trainer.train_sync(args.steps)
    trainer.close()
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"wrote a model and {len(rows)} rows to {args.output}")


if __name__ == "__main__":
    main()
