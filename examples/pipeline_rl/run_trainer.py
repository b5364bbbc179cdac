"""Train on what actors sample, over Redis: a small model at Tic-Tac-Toe.

    redis-server --appendonly yes --appendfsync always   # in one shell
    python examples/pipeline_rl/run_actor.py              # in another; any number of them
    python examples/pipeline_rl/run_trainer.py            # in a third

The trainer asks for groups of episodes, trains on what comes back, and writes each new policy to a
folder that the actors read. Kill any of the three and start it again: nothing is lost, and nothing
is trained on twice. Give both the same --model: a folder, such as the cold start of
`examples/tic_tac_toe`, or a name on the hub.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.pipeline import (
    PipelineBatchSource,
    PipelineConfig,
    PipelinePublisher,
    PolicyFolder,
    TrainerSeat,
)
from ludic.rollouts import EnvSpec, FixedMix, ProtocolSpec, RolloutRequest
from ludic.training import CheckpointConfig, Trainer, TrainerConfig, make_grpo

GAME = RolloutRequest(
    EnvSpec("tic_tac_toe", {"opponent": "mixed", "mark": "random"}),
    ProtocolSpec(
        "single_agent",
        {
            "system_prompt": "You play Tic-Tac-Toe. Answer with one free cell, such as "
            "<move>B2</move>.",
            "parser": {"kind": "xml", "tag": "move", "error_reward": -1.0},
            "context": {"kind": "windowed", "max_turns": 1},
        },
    ),
)
"""What the trainer asks for; actors accept it, and nothing else."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", default="redis://127.0.0.1:6379/0")
    parser.add_argument("--run", default="pipeline-example", help="the name of the run's keys")
    parser.add_argument("--folder", type=Path, default=Path("runs/pipeline-example"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="tiny", help="a folder, or a name on the hub")
    return parser.parse_args()


def load(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer; the tiny one has random weights."""
    if name == "tiny":
        return tiny_model(), tiny_tokenizer()
    return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)


async def main() -> None:
    args = arguments()
    model, tokenizer = load(args.model)
    seat = TrainerSeat(PipelineConfig(args.redis, args.run))
    source = PipelineBatchSource(
        seat=seat,
        request_fn=FixedMix({"game": (GAME, 1.0)}),
        algorithm=make_grpo(group_size=8),
        rollouts_per_update=64,
        checkpoint_every=5,
        max_steps=5,
        max_lag=1,
    )
    trainer = Trainer(
        model=model,
        tokenizer=tokenizer,
        batch_source=source,
        publisher=PipelinePublisher(seat, folder=PolicyFolder(args.folder / "policy")),
        cfg=TrainerConfig(
            learning_rate=1e-3,
            checkpoint=CheckpointConfig(args.folder / "checkpoints", every=5),
            run_dir=args.folder,
        ),
        callbacks=[
            lambda step, m: print(
                f"update {step}: reward {m['train/reward_mean']:+.2f}, "
                f"lag {m['pipeline/lag_mean']:.2f}, waited {m['pipeline/wait_s']:.1f} s",
                flush=True,
            )
        ],
    )
    try:
        await trainer.train(args.steps)
        await source.close("its updates are done")
    finally:
        trainer.close()


if __name__ == "__main__":
    asyncio.run(main())
