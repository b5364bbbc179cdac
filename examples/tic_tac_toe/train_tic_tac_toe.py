"""GRPO with LoRA against a seeded opponent: the quickest reinforcement from end to end.

    python examples/tic_tac_toe/train_tic_tac_toe.py                    # the tiny model, on the CPU
    python examples/tic_tac_toe/train_tic_tac_toe.py --model Qwen/Qwen2.5-7B-Instruct \\
        --lr 1e-5 --port 8000                        # sampled by vLLM

Without a server the model samples in this process, from the very weights that are trained. With
one, the weights go there after every update; start it with `python -m ludic.inference.vllm.server`.
"""

import argparse
import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.distributed import BroadcastPolicyPublisher, LocalPolicyPublisher, PolicyPublisher
from ludic.inference import (
    ChatClient,
    HFChatTemplate,
    InferenceSpec,
    LocalChatClient,
    SamplingConfig,
    VLLMChatClient,
)
from ludic.interaction import Runtime
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.training import RolloutBatchSource, Trainer, TrainerConfig, make_grpo
from ludic.training.metrics.loggers import ConsoleLogger

GAME = RolloutRequest(
    env=EnvSpec("tic_tac_toe", {"opponent": "mixed", "mark": "random"}),
    protocol=ProtocolSpec(
        "single_agent",
        {
            "system_prompt": "You play Tic-Tac-Toe. Answer with one free cell, such as "
            "<move>B2</move>.",
            "parser": {"kind": "xml", "tag": "move", "error_reward": -1.0},
            "context": {"kind": "windowed", "max_turns": 1},
        },
    ),
)


async def train(args: argparse.Namespace) -> None:
    """Rolls out groups of games, trains on them, and brings the weights back to the sampler."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    model = get_peft_model(
        model,
        LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"),
    ).to("cuda" if torch.cuda.is_available() else "cpu")
    algorithm = make_grpo(group_size=args.group_size)

    async with AsyncExitStack() as stack:
        client: ChatClient
        publisher: PolicyPublisher
        if args.port:
            remote = VLLMChatClient([f"http://{args.host}:{args.port}"], model=args.model)
            await stack.enter_async_context(remote)
            await remote.connect(tokenizer=tokenizer)
            client, publisher = remote, BroadcastPolicyPublisher(remote)
        else:
            local = LocalChatClient(model, tokenizer, max_context_tokens=256)
            await stack.enter_async_context(local)
            client, publisher = local, LocalPolicyPublisher(local)
        sampling = SamplingConfig(temperature=1.0, max_tokens=args.max_tokens)
        runtime = Runtime(client, HFChatTemplate(tokenizer), args.model, InferenceSpec(sampling))
        source = RolloutBatchSource(
            engine=RolloutEngine(runtime=runtime, seed=args.seed),
            request_fn=lambda: [GAME] * (args.rollouts_per_update // args.group_size),
            algorithm=algorithm,
            max_steps=6,
            concurrency=64,
            rollouts_per_update=args.rollouts_per_update,
        )
        trainer = Trainer(
            model=model,
            algo=algorithm,
            batch_source=source,
            publisher=publisher,
            cfg=TrainerConfig(learning_rate=args.lr, max_seq_len=512, run_dir=args.output / "log"),
            loggers=[ConsoleLogger(["train/reward_mean", "train/loss", "train/entropy"])],
        )
        await trainer.train(args.steps)
        trainer.close()
    model.merge_and_unload().save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"saved to {args.output}")


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO + LoRA at Tic-Tac-Toe.")
    parser.add_argument("--model", default="runs/tic_tac_toe/sft")
    parser.add_argument("--host", default="127.0.0.1", help="of a vLLM server")
    parser.add_argument("--port", type=int, help="of a vLLM server; default: sample here")
    parser.add_argument("--output", type=Path, default=Path("runs/tic_tac_toe/grpo"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rollouts-per-update", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(train(parser.parse_args()))


if __name__ == "__main__":
    main()
