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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM, StoppingCriteria, StoppingCriteriaList

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
    return np.random.default_rng([request, turn]).integers(0, vocab, count).tolist()


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

    begin = time.process_time()
    await asyncio.gather(*(converse(i) for i in range(len(load.lengths))))
    return time.process_time() - begin


# Hugging Face generate


class _RowLengths(StoppingCriteria):
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
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
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
        begin = time.process_time()
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
        seconds += time.process_time() - begin
        for i, ids in enumerate(histories):
            ids.extend(out[i, width : width + int(lengths[i])].tolist())
    return seconds


# The runs


def half_billion() -> Any:
    """A Qwen2 of 0.5B parameters, random, in bfloat16 on the GPU."""
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("cuda"), torch.random.fork_rng(devices=["cuda"]):
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).to(torch.bfloat16).eval()


async def measure(
    name: str, model: Any, client: LocalChatClient, load: Load, *, repeats: int, hf_turns: int
) -> tuple[float, float]:
    """The engine's tokens/s and its speed-up over generate, best of `repeats` each."""
    vocab = model.config.vocab_size
    ours = []
    for _ in range(repeats):
        async with client.updating():  # forgets what the last run computed
            pass
        before = client.stats()
        ours.append(await run_engine(client, load, vocab))
    after = client.stats()
    theirs = min(run_generate(model, load, vocab, hf_turns) for _ in range(min(repeats, 2)))
    hf_tokens = int(load.lengths[:, :hf_turns].sum())
    rate, hf_rate = load.tokens / min(ours), hf_tokens / theirs
    steps = after["steps"] - before["steps"]
    print(f"{name}: {load.lengths.shape[0]} requests, {load.lengths.shape[1]} turns, {load.tokens} tokens")
    print(f"  engine   {rate:10,.0f} tokens/s  ({min(ours):.3f} s, {steps:.0f} steps, ", end="")
    reused = after["reused_tokens"] - before["reused_tokens"]
    print(f"{reused / (after['prompt_tokens'] - before['prompt_tokens']):.0%} of prompts reused)")
    print(f"  generate {hf_rate:10,.0f} tokens/s  ({theirs:.3f} s for {hf_turns} turns)")
    print(f"  speed-up {rate / hf_rate:10.2f}", flush=True)
    return rate, rate / hf_rate


async def cpu(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    model, tokenizer = tiny_model(max_position_embeddings=2048), tiny_tokenizer()
    equal = equal_load(64, 64, 64)
    ragged = ragged_load(64, 48, 256, turns=4, prompt=32)
    async with LocalChatClient(model, tokenizer, deterministic=not args.fast) as client:
        await run_engine(client, equal_load(64, 16, 8), 258)
        run_generate(model, equal_load(8, 16, 4), 258, 1)
        rate, speedup = await measure(
            "equal", model, client, equal, repeats=args.repeats, hf_turns=1
        )
        ragged_rate, ragged_speedup = await measure(
            "ragged", model, client, ragged, repeats=args.repeats, hf_turns=4
        )
    return {
        "speedup_vs_hf": round(speedup, 2),
        "ragged_speedup_vs_hf": round(ragged_speedup, 2),
        "tokens_per_s": round(rate),
        "ragged_tokens_per_s": round(ragged_rate),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, for both sides")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fast", action="store_true", help="CPU: not deterministic")
    args = parser.parse_args()
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}"
    )
    result = asyncio.run(cpu(args))
    print(json.dumps({"device": args.device, **result}))


if __name__ == "__main__":
    main()
