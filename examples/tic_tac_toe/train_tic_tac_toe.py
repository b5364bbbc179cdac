"""GRPO with LoRA against a seeded opponent: the quickest RL run from end to end.

    python examples/tic_tac_toe/train_tic_tac_toe.py

With a vLLM server at port 8000 (`ludic serve Qwen/Qwen2.5-7B-Instruct`), or at --host and --port,
its model is trained: the server samples, and gets the weights after every update. Without one, the
tiny model of `sft_tic_tac_toe.py` samples in this process, from the weights being trained;
it is created first if it is missing.
"""

import argparse
import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.distributed import BroadcastPolicyPublisher, LocalPolicyPublisher, PolicyPublisher
from ludic.inference import (
    ChatClient,
    FoundServer,
    HFChatTemplate,
    InferenceSpec,
    LocalChatClient,
    SamplingConfig,
    VLLMChatClient,
    find_server,
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


COLD_START = Path("runs/tic_tac_toe/sft")


async def train(args: argparse.Namespace, server: FoundServer | None) -> None:
    """Rolls out groups of games, trains on them, and publishes the weights to the sampler."""
    weights = args.model or (server.model if server else str(COLD_START))
    lr = args.lr or (1e-5 if server else 2e-3)
    max_tokens = args.max_tokens or (64 if server else 8)
    print(f"training {weights}, sampled {'by ' + server.url if server else 'in this process'}")
    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModelForCausalLM.from_pretrained(weights)
    model = get_peft_model(
        model,
        LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"),
    ).to("cuda" if torch.cuda.is_available() else "cpu")
    algorithm = make_grpo(group_size=args.group_size)

    async with AsyncExitStack() as stack:
        client: ChatClient
        publisher: PolicyPublisher
        if server:
            remote = VLLMChatClient([server.url], model=server.name)
            await stack.enter_async_context(remote)
            await remote.connect(tokenizer=tokenizer)
            client, publisher = remote, BroadcastPolicyPublisher(remote)
        else:
            local = LocalChatClient(model, tokenizer, max_context_tokens=256)
            await stack.enter_async_context(local)
            client, publisher = local, LocalPolicyPublisher(local)
        sampling = SamplingConfig(temperature=1.0, max_tokens=max_tokens)
        runtime = Runtime(client, HFChatTemplate(tokenizer), weights, InferenceSpec(sampling))
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
            cfg=TrainerConfig(learning_rate=lr, max_seq_len=512, run_dir=args.output / "log"),
            loggers=[ConsoleLogger(["train/reward_mean", "train/loss", "train/entropy"])],
        )
        await trainer.train(args.steps)
        trainer.close()
    model.merge_and_unload().save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"saved to {args.output}")


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO + LoRA at Tic-Tac-Toe.")
    parser.add_argument("--model", help="default: the server's, or the tiny one")
    parser.add_argument("--host", default="127.0.0.1", help="of a vLLM server")
    parser.add_argument("--port", type=int, help="of a vLLM server; default: 8000, if one is there")
    parser.add_argument("--output", type=Path, default=Path("runs/tic_tac_toe/grpo"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rollouts-per-update", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, help="default: 1e-5 with a server, else 2e-3")
    parser.add_argument("--max-tokens", type=int, help="default: 64 with a server, else 8")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    server = find_server(args.model, host=args.host, port=args.port)
    if server is None and args.model is None and not COLD_START.exists():
        script = Path(__file__).with_name("sft_tic_tac_toe.py")
        subprocess.run([sys.executable, script, "--output", COLD_START], check=True)
    asyncio.run(train(args, server))


if __name__ == "__main__":
    main()
