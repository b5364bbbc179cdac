"""A real vLLM through `VLLMChatClient`: tokens/s beside a bare client, and the doctor.

    python -m benchmarks.vllm                  # the CPU build, a tiny model: shows that it runs
    python -m benchmarks.vllm --device cuda    # one GPU: a 0.5B Qwen2 shape, and SmolLM2

It starts its own servers with the vLLM of this Python (or of `LUDIC_VLLM_PYTHON`). A part that
fails is reported and the others go on. `benchmarks.publish` measures publishes to one. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch

from benchmarks.local_engine import half_billion
from benchmarks.vllm_in_process import ids_of
from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.sampling import SamplingConfig
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import ServerSettings, VLLMServer, free_port
from ludic.inference.vllm.wire import completions_body, generate_body
from ludic.runs.doctor import DoctorReport, run_doctor

NEEDS = ("vllm",)
NAME = "policy"
ROOT = Path(__file__).resolve().parent.parent
LOGS = Path(os.environ.get("OUT") or tempfile.gettempdir())
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 192, 256],
}


@dataclass
class Sizes:
    """How much is asked for."""

    prompt: int = 256
    completion: int = 128
    concurrency: tuple[int, ...] = (128, 256)
    rounds: int = 12


@dataclass
class Results:
    """Figures by name, with what failed; printed as they come, so that a cut run shows them."""

    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, **figures: Any) -> None:
        self.figures |= figures
        print(json.dumps(figures), flush=True)

    async def part(self, name: str, work: Callable[[], Awaitable[None]], limit_s: float) -> None:
        """Runs one part; its failure is a figure too."""
        start = time.perf_counter()
        try:
            async with asyncio.timeout(limit_s):
                await work()
        except Exception as exc:
            traceback.print_exc()
            self.add(**{f"{name}_failed": f"{type(exc).__name__}: {exc}"[:400]})
        print(f"--- {name}: {time.perf_counter() - start:.1f} s", flush=True)


def qwen2_half_billion(device: str) -> tuple[Any, Any]:
    """Random weights in the shape of Qwen2.5-0.5B, and a tokenizer that spells every id."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = half_billion(device)
    words = {f"t{i}": i for i in range(model.config.vocab_size)}
    plain = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="t1", pad_token="t1")
    return model, tokenizer


def smollm2(device: str, gguf: Path | None) -> tuple[Any, Any]:
    """The real SmolLM2: its folder where it is there, else made from the GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tools import smollm2 as tool

    if gguf is None or tool.is_ready():
        folder = tool.path()
    else:
        folder = Path(tempfile.mkdtemp(prefix="smollm2-"))
        tool.convert(gguf, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def server_for(folder: str, cuda: bool, python: str | None, **others: Any) -> VLLMServer:
    """A server of the saved model, with graphs on a GPU; `others` of its settings."""
    extra: tuple[str, ...] = ("--uvicorn-log-level", "warning")
    if cuda:
        extra += ("--compilation-config", json.dumps(GRAPHS))
    usual: dict[str, Any] = {
        "dtype": "bfloat16" if cuda else "float32",
        "max_model_len": 2048 if cuda else 512,
        "max_num_seqs": 256 if cuda else 32,
        "gpu_memory_utilization": 0.3 if cuda else None,
    }
    settings = ServerSettings(
        folder, served_name=NAME, port=free_port(), extra=extra, **{**usual, **others}
    )
    return VLLMServer(settings, python=python, log=LOGS / f"vllm-{settings.port}.log")


def request(n: int, prompt: int, completion: int, vocabulary: int) -> TokenCompletionRequest:
    """The n-th request: ids of its own, so that no prefix is shared, and a completion as long."""
    ids, sampling = ids_of(n, prompt, vocabulary), SamplingConfig(max_tokens=completion, seed=n)
    return TokenCompletionRequest(
        NAME, tuple(ids), sampling, timeout_s=200, extensions={"ignore_eos": True}
    )


async def through_ludic(client: VLLMChatClient, requests: list[Any]) -> int:
    """Output tokens that came back with their log-probs."""
    responses = await asyncio.gather(*map(client.complete_tokens, requests))
    return sum(len(r.trace.completion_token_ids) for r in responses if r.trace)


async def through_aiohttp(client: VLLMChatClient, requests: list[Any]) -> int:
    """The same requests by a client that does nothing but post and decode JSON."""
    replica = client.replicas[0]
    assert replica.facts is not None
    path, make = (
        ("/inference/v1/generate", generate_body)
        if replica.facts.generates
        else ("/v1/completions", completions_body)
    )
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(asked: Any) -> int:
            body = make(asked, 10**6, None)
            async with session.post(replica.url + path, json=body) as answer:
                return len((await answer.json())["choices"][0]["token_ids"])

        return sum(await asyncio.gather(*map(one, requests)))


async def throughput(
    client: VLLMChatClient, sizes: Sizes, vocabulary: int, results: Results
) -> None:
    """Tokens/s of both clients, in rounds of one after the other, each round with new prompts.

    A busy host slows a stretch of seconds, so the ratio is taken round by round and its median
    counts; who goes first changes from round to round.
    """
    serial = 0
    clients = [("bare", through_aiohttp), ("ludic", through_ludic)]
    for many in sizes.concurrency:
        rates: dict[str, list[float]] = {"ludic": [], "bare": []}
        for round_ in range(sizes.rounds + 1):
            for name, ask in clients if round_ % 2 else clients[::-1]:
                size = (sizes.prompt, sizes.completion, vocabulary)
                requests = [request(serial + n, *size) for n in range(many)]
                serial += many
                start = time.perf_counter()
                tokens = await ask(client, requests)
                if round_:  # the first warms up
                    rates[name].append(tokens / (time.perf_counter() - start))
        ratios = [ours / bare for ours, bare in zip(rates["ludic"], rates["bare"], strict=True)]
        results.add(
            **{
                f"tokens_s_{many}": round(statistics.median(rates["ludic"])),
                f"tokens_s_{many}_bare": round(statistics.median(rates["bare"])),
                f"ratio_{many}": round(statistics.median(ratios), 3),
                f"ratio_{many}_rounds": [round(r, 3) for r in ratios],
                f"tokens_s_{many}_rounds": {k: [round(v) for v in r] for k, r in rates.items()},
            }
        )


async def in_process(
    folder: str, python: str, sizes: Sizes, vocabulary: int, cuda: bool, results: Results
) -> None:
    """Tokens/s of vLLM's own `LLM` class on the same requests, in a process by itself."""
    engine: dict[str, Any] = {
        "dtype": "bfloat16" if cuda else "float32",
        "max_model_len": 2048 if cuda else 512,
        "max_num_seqs": 256 if cuda else 32,
    }
    if cuda:
        engine |= {"gpu_memory_utilization": 0.3, "compilation_config": GRAPHS}
    settings = {"folder": folder, "vocabulary": vocabulary, "engine": engine}
    settings |= {n: getattr(sizes, n) for n in ("prompt", "completion", "concurrency", "rounds")}
    command = [python, "-m", "benchmarks.vllm_in_process", json.dumps(settings)]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"vLLM's LLM failed: {err.decode()[-400:]}")
    # vLLM may say something after it.
    (found,) = (line for line in out.decode().splitlines() if line.startswith('{"tokens_s_'))
    results.add(**json.loads(found))


async def doctor(
    client: VLLMChatClient,
    publisher: BroadcastPolicyPublisher,
    model: Any,
    tokenizer: Any,
    name: str,
    results: Results,
) -> None:
    """The doctor's table, as text and as figures."""
    report: DoctorReport = await run_doctor(
        model, tokenizer, client, model_name=NAME, publisher=publisher, requests=32, max_tokens=64
    )
    print(f"doctor, {name}:\n{report.table()}", flush=True)
    rows = [
        {"setting": r.setting, "mean": r.mean, "max": r.max, "ok": r.ok, "note": r.note}
        for r in report.rows
    ]
    results.add(**{f"doctor_{name}_ok": report.ok, f"doctor_{name}": rows})


async def measure(
    name: str,
    made: Callable[[], tuple[Any, Any]],
    args: argparse.Namespace,
    sizes: Sizes | None,
    results: Results,
) -> None:
    """One model: save it, serve it, and measure what is asked of it."""
    cuda = args.device == "cuda"
    model, tokenizer = made()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        start = time.perf_counter()
        with server_for(folder, cuda, args.python) as server:
            results.add(
                **{
                    f"{name}_start_s": round(time.perf_counter() - start, 1),
                    "vllm": server.build.version,
                }
            )
            client = VLLMChatClient(server.url, model=NAME)
            async with client:
                publisher = BroadcastPolicyPublisher(client, timeout_s=60)
                vocabulary = int(model.get_input_embeddings().weight.shape[0])
                if sizes is not None:
                    await results.part(
                        f"{name}_throughput",
                        lambda: throughput(client, sizes, vocabulary, results),
                        200,
                    )
                await results.part(
                    f"{name}_doctor",
                    lambda: doctor(client, publisher, model, tokenizer, name, results),
                    120,
                )
            python = server.build.python
        if sizes is not None:
            await results.part(
                f"{name}_in_process",
                lambda: in_process(folder, python, sizes, vocabulary, cuda, results),
                200,
            )


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """All parts that fit the device."""
    results = Results()
    if args.device == "cuda":
        if "half_billion" in args.models:
            await results.part(
                "half_billion",
                lambda: measure(
                    "half_billion", lambda: qwen2_half_billion("cuda"), args, Sizes(), results
                ),
                420,
            )
            torch.cuda.empty_cache()
        if "smollm2" in args.models:
            await results.part(
                "smollm2",
                lambda: measure("smollm2", lambda: smollm2("cuda", args.gguf), args, None, results),
                240,
            )
    else:
        tiny = tiny_model(hidden_size=64, heads=2, kv_heads=1), tiny_tokenizer()
        sizes = Sizes(prompt=64, completion=32, concurrency=(16,), rounds=1)
        await results.part("tiny", lambda: measure("tiny", lambda: tiny, args, sizes, results), 400)
    return results.figures


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure a real vLLM through Ludic's client.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--python", help="the Python that has vLLM; else LUDIC_VLLM_PYTHON")
    parser.add_argument(
        "--models", nargs="+", default=["half_billion", "smollm2"], help="on a GPU: which of them"
    )
    parser.add_argument("--gguf", type=Path, help="SmolLM2's file, where its folder is not made")
    args = parser.parse_args()
    own = ROOT / ".venv-vllm/bin/python"
    if args.python is None and "LUDIC_VLLM_PYTHON" not in os.environ and args.device == "cpu":
        args.python = str(own) if own.is_file() else None
    figures = asyncio.run(run(args))
    print(json.dumps(figures))
    return 1 if any(name.endswith("_failed") for name in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
