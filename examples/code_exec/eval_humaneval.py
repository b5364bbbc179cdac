"""HumanEval: every task once or several times, each answer in a sandbox, with intervals.

    python examples/code_exec/eval_humaneval.py --data HumanEval.jsonl --model runs/code-exec
    python examples/code_exec/eval_humaneval.py --model Qwen/Qwen2.5-Coder-7B-Instruct \\
        --port 8000 --samples 10 --temperature 0.8

Without --data, the dataset comes from the Hugging Face hub, which needs the extra `datasets`.
"""

import argparse
import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.envs.code_exec import CodeExecEnv
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
    """`samples` requests for each task, by its row."""
    source = {"path": str(args.data)} if args.data else {"hub": "openai/openai_humaneval"}
    tasks = {**source, "split": "test", "adapter": "humaneval", "sandbox": args.sandbox}
    rows = CodeExecEnv(**tasks, limit=args.limit).num_rows()
    return [
        request
        for index in range(rows)
        for request in eval_requests(
            RolloutRequest(
                env=EnvSpec("code_exec", {**tasks, "index": index}),
                protocol=ProtocolSpec("single_agent", {}),
            ),
            args.samples,
            seed=derive_seed(args.seed, "task", index),
            samples_per_task=args.samples,
        )
    ]


async def evaluate(args: argparse.Namespace) -> None:
    """Answers, runs, prints a table, and optionally writes every episode's result."""
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
        with episodes_bar("HumanEval") as update:
            report = await RolloutEvaluator(
                engine=RolloutEngine(runtime=runtime),
                requests=requests,
                max_steps=1,
                name="HumanEval",
                on_progress=update,
                outcomes=["passed"],
            ).evaluate()
    Console().print(report_table([report]))
    for k in {1, args.samples}:
        print(f"pass@{k}: {report.pass_at(k)}")
    if args.output:
        args.output.write_text(json.dumps(report.to_dict(), indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluates a model on HumanEval.")
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--host", default="127.0.0.1", help="of a vLLM server")
    parser.add_argument("--port", type=int, help="of a vLLM server; default: 8000, if one is there")
    parser.add_argument("--data", type=Path, help="HumanEval.jsonl; default: from the hub")
    parser.add_argument("--sandbox", default="bubblewrap")
    parser.add_argument("--samples", type=int, default=1, help="answers per task")
    parser.add_argument("--limit", type=int, help="only the first tasks")
    parser.add_argument("--temperature", type=float, default=0.2)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--max-context-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1_000_003)
    parser.add_argument("--output", type=Path)
    asyncio.run(evaluate(parser.parse_args()))


if __name__ == "__main__":
    main()
