"""How well does a model play? Held-out games, with intervals.

    python examples/tic_tac_toe/eval_tic_tac_toe_vllm.py --model runs/tic_tac_toe/grpo
    python examples/tic_tac_toe/eval_tic_tac_toe_vllm.py --model Qwen/Qwen2.5-7B-Instruct

If a vLLM server at port 8000, or at --host and --port, serves the model, it plays there; else the
model plays in this process.
"""

import argparse
import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.eval import report_table, run_eval
from ludic.inference import (
    ChatClient,
    HFChatTemplate,
    InferenceSpec,
    LocalChatClient,
    SamplingConfig,
    VLLMChatClient,
    find_server,
)
from ludic.interaction import Runtime
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest

SYSTEM = "You play Tic-Tac-Toe. Answer with one free cell, such as <move>B2</move>."


async def evaluate(args: argparse.Namespace) -> None:
    """Plays, prints a table, and optionally writes every game's result."""
    server = find_server(args.model, host=args.host, port=args.port)
    tokenizer = AutoTokenizer.from_pretrained(server.model if server else args.model)
    game = RolloutRequest(
        env=EnvSpec("tic_tac_toe", {"opponent": args.opponent, "mark": "random"}),
        protocol=ProtocolSpec(
            "single_agent",
            {
                "system_prompt": SYSTEM,
                "parser": {"kind": "xml", "tag": "move", "error_reward": -1.0},
                "context": {"kind": "windowed", "max_turns": 1},
            },
        ),
    )
    async with AsyncExitStack() as stack:
        client: ChatClient
        if server:
            remote = VLLMChatClient([server.url], model=server.name)
            await stack.enter_async_context(remote)
            await remote.connect(tokenizer=tokenizer)
            client = remote
        else:
            model = AutoModelForCausalLM.from_pretrained(args.model)
            model.to("cuda" if torch.cuda.is_available() else "cpu")
            local = LocalChatClient(model, tokenizer, max_context_tokens=256)
            client = await stack.enter_async_context(local)
        sampling = SamplingConfig(temperature=args.temperature, max_tokens=args.max_tokens)
        runtime = Runtime(client, HFChatTemplate(tokenizer), args.model, InferenceSpec(sampling))
        report = await run_eval(
            RolloutEngine(runtime=runtime),
            game,
            episodes=args.games,
            max_steps=6,
            seed=args.seed,
            name=args.model,
            outcomes=["win"],
        )
    Console().print(report_table([report]))
    if args.output:
        args.output.write_text(json.dumps(report.to_dict(), indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluates a model at Tic-Tac-Toe.")
    parser.add_argument("--model", default="runs/tic_tac_toe/grpo")
    parser.add_argument("--host", default="127.0.0.1", help="of a vLLM server")
    parser.add_argument("--port", type=int, help="of a vLLM server; default: 8000, if one is there")
    parser.add_argument("--opponent", choices=["random", "mixed", "perfect"], default="mixed")
    parser.add_argument("--games", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1_000_003)
    parser.add_argument("--output", type=Path)
    asyncio.run(evaluate(parser.parse_args()))


if __name__ == "__main__":
    main()
