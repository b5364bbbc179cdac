"""How many of GSM8K's test problems does a model solve? Each row once or more, with intervals.

    python examples/gsm8k/eval_gsm8k_vllm.py --model runs/gsm8k-…/checkpoints/rl/step-…/model
    python examples/gsm8k/eval_gsm8k_vllm.py --model Qwen/Qwen2.5-7B-Instruct \\
        --samples 4 --temperature 0.7

If a vLLM server at port 8000, or at --host and --port, serves the model, it answers there; else the
model answers in this process.
Without --data the test set comes from the hub, which needs the extra `datasets`.
"""

import argparse
import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.envs import GSM8KEnv
from ludic.eval import RolloutEvaluator, episodes_bar, eval_requests, report_table
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
from ludic.seeding import derive_seed


def make_requests(args: argparse.Namespace) -> list[RolloutRequest]:
    """`samples` requests for each row. Only the number counts; the format gets no reward."""
    source: dict[str, Any] = {"path": str(args.data)} if args.data else {"split": "test"}
    rows = GSM8KEnv(**source, limit=args.limit).num_rows()
    protocol = ProtocolSpec("single_agent", {"parser": {"kind": "boxed", "error_reward": 0.0}})
    return [
        request
        for index in range(rows)
        for request in eval_requests(
            RolloutRequest(env=EnvSpec("gsm8k", {**source, "index": index}), protocol=protocol),
            args.samples,
            seed=derive_seed(args.seed, "row", index),
            samples_per_task=args.samples,
        )
    ]


async def evaluate(args: argparse.Namespace) -> None:
    """Answers, prints a table, and optionally writes every episode's result."""
    requests = make_requests(args)
    server = find_server(args.model, host=args.host, port=args.port)
    tokenizer = AutoTokenizer.from_pretrained(server.model if server else args.model)
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
            local = LocalChatClient(model, tokenizer, max_context_tokens=args.max_context_tokens)
            client = await stack.enter_async_context(local)
        sampling = SamplingConfig(temperature=args.temperature, max_tokens=args.max_tokens)
        runtime = Runtime(client, HFChatTemplate(tokenizer), args.model, InferenceSpec(sampling))
        with episodes_bar("GSM8K") as update:
            report = await RolloutEvaluator(
                engine=RolloutEngine(runtime=runtime),
                requests=requests,
                max_steps=1,
                concurrency=args.concurrency,
                name="GSM8K",
                on_progress=update,
                outcomes=["right"],
            ).evaluate()
    Console().print(report_table([report]))
    for k in sorted({1, args.samples}):
        print(f"pass@{k}: {report.pass_at(k)}")
    if args.output:
        args.output.write_text(json.dumps(report.to_dict(), indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluates a model on GSM8K.")
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--host", default="127.0.0.1", help="of a vLLM server")
    parser.add_argument("--port", type=int, help="of a vLLM server; default: 8000, if one is there")
    parser.add_argument("--data", type=Path, help="test.jsonl; default: from the hub")
    parser.add_argument("--samples", type=int, default=1, help="answers per row")
    parser.add_argument("--limit", type=int, help="only the first rows")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-context-tokens", type=int, default=1024)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1_000_003)
    parser.add_argument("--output", type=Path)
    asyncio.run(evaluate(parser.parse_args()))


if __name__ == "__main__":
    main()
