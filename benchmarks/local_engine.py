"""The in-process engine beside Hugging Face `generate`, on the same load, in one run.

    python -m benchmarks.local_engine                  # CPU, tiny model
    python -m benchmarks.local_engine --device cuda    # one GPU, a 0.5B Qwen2 shape in bfloat16

Two loads. Equal: every request has the same prompt and completion length. Ragged: completion
lengths are geometric, and each request is a conversation of several turns, whose prompts extend one
another. `generate` gets the whole batch with left padding and stops when its last row is done,
which is the best it can be fed with; on the ragged load it takes one turn of all conversations at
a time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import StoppingCriteria, StoppingCriteriaList

from benchmarks.decode import step_ms
from benchmarks.random_models import SHAPES, qwen2, random_weights
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import SamplingConfig
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.types import ChatResponse


@dataclass(frozen=True)
class Load:
    """`lengths` [requests, turns]: sampled tokens. Each turn's prompt gains `new_tokens` tokens
    over the conversation so far; the first one has `prompt_tokens`."""

    prompt_tokens: int
    new_tokens: int
    lengths: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def equal_load(requests: int, prompt: int, completion: int) -> Load:
    return Load(prompt, 0, np.full((requests, 1), completion))


def ragged_load(requests: int, mean: float, at_most: int, turns: int, prompt: int) -> Load:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(1 / mean, size=(requests, turns)), at_most)
    return Load(prompt, 16, lengths)


def user_tokens(request: int, turn: int, count: int, vocab: int) -> list[int]:
    """The tokens that a request's turn adds: random, and the same in every run."""
    return [int(t) for t in np.random.default_rng([request, turn]).integers(0, vocab, count)]


# The engine


async def run_engine(client: LocalChatClient, load: Load, vocab: int) -> float:
    """Seconds for the whole load, every conversation on its own."""

    async def converse(request: int) -> None:
        ids: tuple[int, ...] = ()
        for turn, length in enumerate(load.lengths[request].tolist()):
            count = load.new_tokens if turn else load.prompt_tokens
            ids += tuple(user_tokens(request, turn, count, vocab))
            answer: ChatResponse = await client.complete_tokens(
                TokenCompletionRequest(
                    "policy",
                    ids,
                    SamplingConfig(max_tokens=length, seed=1000 * request + turn),
                    conversation_id=str(request),
                    extensions={"ignore_eos": True},
                )
            )
            assert answer.trace is not None
            assert len(answer.trace.completion_token_ids) == length
            ids = answer.trace.token_ids

    begin = time.perf_counter()
    await asyncio.gather(*(converse(i) for i in range(len(load.lengths))))
    return time.perf_counter() - begin


# Hugging Face generate


class _RowLengths(StoppingCriteria):  # type: ignore[misc]
    """Each row ends at its own length, so that the call ends with the longest of them."""

    def __init__(self, prompt: int, lengths: torch.Tensor) -> None:
        self.ends = prompt + lengths

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] >= self.ends


@torch.inference_mode()
def run_generate(model: Any, load: Load, vocab: int, turns: int) -> float:
    """Seconds for the first `turns` turns of the load."""
    device = model.device
    histories: list[list[int]] = [[] for _ in load.lengths]
    sync: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else dict
    seconds = 0.0
    for turn in range(turns):
        for i, ids in enumerate(histories):
            count = load.new_tokens if turn else load.prompt_tokens
            ids.extend(user_tokens(i, turn, count, vocab))
        width = max(map(len, histories))
        batch = torch.zeros(len(histories), width, dtype=torch.long)
        mask = torch.zeros_like(batch)
        for i, ids in enumerate(histories):
            batch[i, width - len(ids) :] = torch.tensor(ids)
            mask[i, width - len(ids) :] = 1
        lengths = torch.tensor(load.lengths[:, turn], device=device)
        sync()
        begin = time.perf_counter()
        out = model.generate(
            input_ids=batch.to(device),
            attention_mask=mask.to(device),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=int(lengths.max()),
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([_RowLengths(width, lengths)]),
        )
        sync()
        seconds += time.perf_counter() - begin
        for i, ids in enumerate(histories):
            ids.extend(out[i, width : width + int(lengths[i])].tolist())
    return seconds


# The runs


def half_billion(device: str = "cuda") -> Any:
    """A Qwen2 of 0.5B parameters in bfloat16, the same random ones every time."""
    torch.manual_seed(0)
    return random_weights(qwen2(SHAPES["0.5b"], max_position_embeddings=8192), device).eval()


def time_generate(model: Any, load: Load, *, turns: int, repeats: int) -> float:
    """generate's tokens/s over the first `turns` turns, best of `repeats`."""
    vocab = model.config.vocab_size
    seconds = min(run_generate(model, load, vocab, turns) for _ in range(repeats))
    return float(load.lengths[:, :turns].sum()) / seconds


async def time_engine(client: LocalChatClient, load: Load, vocab: int, *, repeats: int) -> float:
    """The engine's tokens/s, best of `repeats`, with the parts of the best run printed."""
    times: list[float] = []
    spent: dict[str, float] = {}
    for _ in range(repeats):
        async with client.updating():  # forgets what the last run computed
            pass
        before = client.stats()
        times.append(await run_engine(client, load, vocab))
        if times[-1] == min(times):
            after = client.stats()
            spent = {k: after[k] - before[k] for k in after}
    reused = spent["reused_tokens"] / spent["prompt_tokens"]
    host = spent["busy_seconds"] - spent["wait_seconds"] - spent["prefill_seconds"]
    print(f"  engine: {min(times):.3f} s, {reused:.0%} of prompts reused")
    print(
        f"    {spent['steps']:.0f} steps; prefill {spent['prefill_seconds']:.3f} s, waiting for "
        f"the device {spent['wait_seconds']:.3f} s, the rest of the thread {host:.3f} s"
    )
    return load.tokens / min(times)


def compared(name: str, load: Load, rate: float, hf_rate: float) -> float:
    """Prints one load's comparison; answers the speed-up."""
    requests, turns = load.lengths.shape
    print(f"{name}: {requests} requests, {turns} turns, {load.tokens} tokens")
    print(f"  engine   {rate:10,.0f} tokens/s")
    print(f"  generate {hf_rate:10,.0f} tokens/s")
    print(f"  speed-up {rate / hf_rate:10.2f}", flush=True)
    return rate / hf_rate


def figures(speedup: float, ragged: float, rate: float, ragged_rate: float) -> dict[str, Any]:
    return {
        "speedup_vs_hf": round(speedup, 2),
        "ragged_speedup_vs_hf": round(ragged, 2),
        "tokens_per_s": round(rate),
        "ragged_tokens_per_s": round(ragged_rate),
    }


async def cpu(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    model, tokenizer = tiny_model(max_position_embeddings=2048), tiny_tokenizer()
    equal = equal_load(64, 32, 128)
    ragged = ragged_load(64, 48, 256, turns=4, prompt=32)
    run_generate(model, equal_load(8, 16, 4), 258, 1)
    async with LocalChatClient(model, tokenizer, deterministic=not args.fast) as client:
        await run_engine(client, equal_load(64, 16, 8), 258)
        rate = await time_engine(client, equal, 258, repeats=args.repeats)
        hf_rate = time_generate(model, equal, turns=1, repeats=args.repeats)
        speedup = compared("equal", equal, rate, hf_rate)
        ragged_rate = await time_engine(client, ragged, 258, repeats=args.repeats)
        hf_rate = time_generate(model, ragged, turns=4, repeats=args.repeats)
        ragged_speedup = compared("ragged", ragged, ragged_rate, hf_rate)
    return figures(speedup, ragged_speedup, rate, ragged_rate)


def print_step_time(client: LocalChatClient, rows: int, length: int) -> None:
    ms = step_ms(client, rows, length)
    print(f"  a step of {rows} rows with {length} tokens each: {ms:.2f} ms", flush=True)


async def check_on_gpu() -> None:
    """The graph's log-probs against plain forward passes in float32, over a mixed load."""
    model = tiny_model(hidden_size=128, layers=3).cuda()
    rng = np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {}, {"top_p": 0.9}, {"top_k": 7}]
    requests = []
    for i in range(96):
        shared = np.random.default_rng(1).integers(0, 258, 80 if i % 3 == 0 else 0).tolist()
        prompt = shared + rng.integers(0, 258, int(rng.integers(1, 150))).tolist()
        kind = kinds[i % len(kinds)] if i >= 48 else kinds[i % 3]
        sampling = SamplingConfig(max_tokens=int(rng.integers(1, 200)), seed=i, **kind)
        requests.append(TokenCompletionRequest("check", tuple(prompt), sampling))
    worst = 0.0
    async with LocalChatClient(model, tiny_tokenizer(), max_slots=32) as client:
        # The first half alone never leaves the graph; the second has rows sampled outside of it.
        answers = await asyncio.gather(*(client.complete_tokens(r) for r in requests[:48]))
        answers += await asyncio.gather(*(client.complete_tokens(r) for r in requests[48:]))
        assert client.stats()["slots_taken"] == 0
    for request, answer in zip(requests, answers, strict=True):
        if request.sampling.truncates:
            continue
        trace = answer.trace
        assert trace is not None
        assert trace.completion_logprobs is not None
        ids, n = trace.token_ids, len(trace.prompt_token_ids)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids], device="cuda")).logits[0].float()
        logp = torch.log_softmax(logits / request.sampling.temperature, -1)
        at = torch.arange(n - 1, len(ids) - 1)
        wanted = logp[at, list(ids[n:])].cpu()
        worst = max(worst, float((wanted - torch.tensor(trace.completion_logprobs)).abs().max()))
    print(f"check, tiny float32 model: log-probs differ from a plain pass by at most {worst:.2e}")
    if worst > 1e-3:
        raise SystemExit("the engine's log-probs are wrong on this GPU")


async def check_half_billion(model: Any, client: LocalChatClient) -> None:
    """The same in bfloat16, where two orders of summation differ by some hundredths."""
    prompts = [user_tokens(i, 0, 40 + i, model.config.vocab_size) for i in range(16)]
    answers = await asyncio.gather(
        *(
            client.complete_tokens(
                TokenCompletionRequest(
                    "check",
                    tuple(p),
                    SamplingConfig(max_tokens=32, seed=i),
                    extensions={"ignore_eos": True},
                )
            )
            for i, p in enumerate(prompts)
        )
    )
    gaps = []
    for answer in answers:
        trace = answer.trace
        assert trace is not None
        ids, n = trace.token_ids, len(trace.prompt_token_ids)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids], device="cuda")).logits[0, n - 1 : -1]
        logp = torch.log_softmax(logits.float(), -1).cpu()
        wanted = logp[torch.arange(len(ids) - n), list(ids[n:])]
        gaps.append((wanted - torch.tensor(trace.completion_logprobs)).abs())
    gap = torch.cat(gaps)
    print(
        f"check, 0.5B bfloat16: log-probs differ by {gap.mean():.4f} on average, "
        f"{gap.max():.4f} at most"
    )
    if not gap.mean() < 0.05:
        raise SystemExit("the engine's log-probs are wrong in bfloat16")


async def gpu(args: argparse.Namespace) -> dict[str, Any]:
    print(torch.cuda.get_device_name())
    await check_on_gpu()
    model, tokenizer = half_billion(), tiny_tokenizer()
    equal = equal_load(128, 256, 128)
    ragged = ragged_load(256, 200, 1024, turns=args.turns, prompt=64)
    vocab = model.config.vocab_size
    # generate first, before there is an engine in the process that it could be slowed by.
    run_generate(model, equal_load(128, 256, 8), vocab, 1)
    hf_equal = time_generate(model, equal, turns=1, repeats=2)
    print(f"generate, 128 requests: {128 / hf_equal * 1000:.1f} ms a step", flush=True)
    hf_ragged = time_generate(model, ragged, turns=1, repeats=1)
    options: dict[str, Any] = {"prefix_cache_tokens": 400_000}
    async with LocalChatClient(
        model, tokenizer, max_slots=128, max_context_tokens=512, **options
    ) as client:
        await check_half_billion(model, client)
        await run_engine(client, equal, vocab)
        rate = await time_engine(client, equal, vocab, repeats=args.repeats)
        speedup = compared("equal", equal, rate, hf_equal)
        async with client.updating():
            for length in (256, 384):
                print_step_time(client, 128, length)
    longest = int(ragged.lengths.sum(1).max()) + 64 + 16 * args.turns
    context = -(-longest // 64) * 64
    print(f"ragged: the longest conversation has {longest} tokens", flush=True)
    async with LocalChatClient(
        model, tokenizer, max_slots=256, max_context_tokens=context, **options
    ) as client:
        begin = time.perf_counter()
        await run_engine(client, ragged, vocab)
        print(f"ragged: first run, captures included: {time.perf_counter() - begin:.2f} s")
        ragged_rate = await time_engine(client, ragged, vocab, repeats=1)
        ragged_speedup = compared("ragged", ragged, ragged_rate, hf_ragged)
        async with client.updating():
            for rows, length in ((16, 1024), (64, 1024), (256, 512), (256, 1024), (256, context)):
                print_step_time(client, rows, length)
    found = figures(speedup, ragged_speedup, rate, ragged_rate)
    return {**found, "gpu": torch.cuda.get_device_name()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, for both sides")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4, help="GPU: turns of the ragged load")
    parser.add_argument("--fast", action="store_true", help="CPU: not deterministic")
    args = parser.parse_args()
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}"
    )
    result = asyncio.run(gpu(args) if args.device == "cuda" else cpu(args))
    print(json.dumps({"device": args.device, **result}))


if __name__ == "__main__":
    main()
