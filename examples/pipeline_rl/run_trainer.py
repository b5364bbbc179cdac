"""Train on what actors sample, over Redis: a small model at Tic-Tac-Toe.

    redis-server --appendonly yes --appendfsync always   # in one shell
    python examples/pipeline_rl/run_actor.py              # in another; any number of them
    python examples/pipeline_rl/run_trainer.py            # in a third

The trainer requests groups of episodes, trains on them, and writes each new policy to a
folder that the actors read. Kill any of the three and start it again: nothing is lost, and nothing
is trained on twice. Give both the same --model: a folder, such as the cold start of
`examples/tic_tac_toe`, or a name on the hub. With --port, vLLM samples: start it with
`ludic serve`, and give both the same port; the trainer then sends it the
weights after every update.

For another Redis, set the environment variable LUDIC_REDIS_URL, with the password: an argument
would show it to everyone on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.distributed import BackgroundPublisher, BroadcastPolicyPublisher
from ludic.inference import VLLMChatClient
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.pipeline import (
    PipelineBatchSource,
    PipelineConfig,
    PipelinePublisher,
    PolicyFolder,
    TrainerLease,
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
    parser.add_argument("--run", default="pipeline-example", help="the name of the run's keys")
    parser.add_argument("--folder", type=Path, default=Path("runs/pipeline-example"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="tiny", help="a folder, or a name on the hub")
    parser.add_argument("--host", default="127.0.0.1", help="of a vLLM server")
    parser.add_argument("--port", type=int, help="of a vLLM server; default: the actors sample")
    return parser.parse_args()


def redis_url() -> str:
    return os.environ.get("LUDIC_REDIS_URL", "redis://127.0.0.1:6379/0")


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(name: str) -> Any:
    """A model, on the GPU if there is one; the tiny one has random weights."""
    model = tiny_model() if name == "tiny" else AutoModelForCausalLM.from_pretrained(name)
    return model.to(device())


def load_tokenizer(name: str) -> Any:
    return tiny_tokenizer() if name == "tiny" else AutoTokenizer.from_pretrained(name)


async def server(args: argparse.Namespace, tokenizer: Any, stack: AsyncExitStack) -> VLLMChatClient:
    """The vLLM server of --host and --port."""
    client = VLLMChatClient([f"http://{args.host}:{args.port}"], model=args.model)
    await stack.enter_async_context(client)
    await client.connect(tokenizer=tokenizer)
    return client


async def main() -> None:
    args = arguments()
    async with AsyncExitStack() as stack:
        await train(args, stack)


async def train(args: argparse.Namespace, stack: AsyncExitStack) -> None:
    """Requests, trains and publishes until all updates are done."""
    model, tokenizer = load_model(args.model), load_tokenizer(args.model)
    lease = TrainerLease(PipelineConfig(redis_url(), args.run))
    if args.port:
        vllm = BroadcastPolicyPublisher(await server(args, tokenizer, stack))
        publisher = PipelinePublisher(lease, vllm)
    else:
        publisher = PipelinePublisher(lease, folder=PolicyFolder(args.folder / "policy"))
    source = PipelineBatchSource(
        lease=lease,
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
        publisher=BackgroundPublisher(publisher),
        cfg=TrainerConfig(
            learning_rate=1e-3,
            checkpoint=CheckpointConfig(args.folder / "checkpoints", every=5),
            run_dir=args.folder,
        ),
        callbacks=[
            lambda step, m: print(
                f"update {step}: reward {m['train/reward_mean']:+.2f}, "
                f"lag {m['train/pipeline_lag_mean']:.2f}, "
                f"waited {m['perf/pipeline_wait_s']:.1f} s",
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
